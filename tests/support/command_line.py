"""The command `fusedce` in this process, and what it answers."""

import json

from click.testing import CliRunner

from fusedce.cli import main


def call(*args):
    return CliRunner().invoke(main, list(args))


def answer(*args, status=0):
    """JSON on standard output, which must hold nothing else."""
    done = call(*args, "--json")
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)
