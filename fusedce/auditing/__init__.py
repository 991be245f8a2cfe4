"""An audit of any training loop: how much each token weighs in each optimizer step."""

from fusedce.auditing.hooks import Audit, audit
from fusedce.auditing.steps import Step

__all__ = ["Audit", "Step", "audit"]
