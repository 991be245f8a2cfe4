"""Functions that processes of the measuring engine build and call in its tests."""

import os
import time


def worker(seconds):
    """Takes that much processor time, which sleeping does not."""

    def call():
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    return call


def dies():
    return lambda: os._exit(7)


def raises():
    def call():
        raise ValueError("as meant")

    return call
