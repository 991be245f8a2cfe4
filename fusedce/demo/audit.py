"""`fusedce audit`: what the audit finds in the demo's loops, the wrong one and the right one."""

from __future__ import annotations
