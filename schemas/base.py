"""What every wire message has in common.

Invariants: a message is frozen, its fields are named on the wire as in Python, fields that a newer peer added are
ignored (DESIGN section 3), and nothing in this package has behaviour beyond parsing and comparing.
"""

import msgspec


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all wire messages. Unknown fields are ignored, so that a newer peer can add some."""


class Body(Wire, frozen=True, kw_only=True, tag_field="route"):
    """Base of command bodies; each subclass is tagged with its route."""


class Data(Wire, frozen=True, kw_only=True, tag_field="type"):
    """Base of what a result can carry."""
