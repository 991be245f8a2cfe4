"""Functions that processes of the measuring engine build and call in its tests."""

import os
import time


def sleeper(seconds):
    return lambda: time.sleep(seconds)


def dies():
    return lambda: os._exit(7)


def raises():
    def call():
        raise ValueError("as meant")

    return call
