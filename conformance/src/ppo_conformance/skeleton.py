"""The text of a new adapter."""

from __future__ import annotations

from ppo_conformance.families import FAMILIES

_HEAD = '''"""What <your library> computes, for `conformance run`.

Fill in the functions that your library has and delete the others.  They get numpy arrays (B rows,
T tokens, V words; floats are float32) and return an array, or a dict of the outputs named below;
leave out an output that the library does not compute.  Call the library's own function and reshape
around it; do not compute here what you want to have checked.

`raise NotOffered("why")` where the library has no such option.
"""

from ppo_conformance import NotOffered
from ppo_conformance.adapting import tensors, with_gradient  # only if your library uses torch

LIBRARY = "my library"
VERSION = "0.1"
'''


def skeleton() -> str:
    """An adapter with every family, its formula and its shapes."""
    parts = [_HEAD]
    for f in FAMILIES.values():
        shapes = "\n".join(f"    {name}: {text}" for name, text in f.inputs.items())
        shapes += "".join(
            f"\n    {name}: {text}; add it if you need it" for name, text in f.optional.items()
        )
        outputs = ", ".join(f.outputs)
        parts.append(
            f'\ndef {f.signature}:\n    """{f.title}: {f.formula}\n\n{shapes}\n'
            f'    returns: {outputs}\n    """\n    raise NotOffered("not filled in yet")\n'
        )
    return "\n".join(parts)
