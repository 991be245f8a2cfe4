"""No tensor of the package is made in torch's default dtype, or on its default device.

A buffer that takes such a dtype is half or twice as large as the library that writes into it
believes. (That results are the same in another default dtype: tests/loss/test_referees.py.)
"""

import ast
from pathlib import Path

import fusedce

PACKAGE = Path(fusedce.__file__).parent
ROOMS = (
    "contract", "loss", "autograd", "backends", "head", "accumulate", "agreement.py", "recipes.py",
)  # fmt: skip
FLOATING = {"empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace"}
WHOLE = {"tensor", "as_tensor", "scalar_tensor", "arange", "randint"}  # dtype of their values


def factories(path):
    """Calls of ``torch.<factory>``: line, name and keywords."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FLOATING | WHOLE
        ):
            yield node.lineno, node.func.attr, {k.arg for k in node.keywords}, node.args


def test_every_new_tensor_names_its_dtype_and_device():
    found, missing = 0, []
    for room in ROOMS:
        files = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
        for path in files:
            for line, name, given, args in factories(path):
                found += 1
                of_a_tensor = name == "as_tensor" and not isinstance(args[0], ast.Constant)
                needs = ({"dtype"} if name in FLOATING else set()) | (
                    set() if of_a_tensor else {"device"}
                )
                if needs - given and None not in given:  # (None: `**options`)
                    lacks = ", ".join(sorted(needs - given))
                    missing.append(f"{path.relative_to(PACKAGE)}:{line} torch.{name} lacks {lacks}")
    assert found > 50
    assert not missing, "\n".join(missing)
