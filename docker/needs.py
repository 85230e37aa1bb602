"""Prints what pyproject.toml asks for, with the extras that are named: `python3 docker/needs.py [EXTRA ...]`."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
needs = [*project["dependencies"]]
for extra in sys.argv[1:]:
    needs += project["optional-dependencies"][extra]
print("\n".join(needs))
