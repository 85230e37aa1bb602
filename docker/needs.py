"""Prints what pyproject.toml asks for, with the extras that are named: `python3 docker/needs.py [EXTRA ...]`."""

import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], *(line for extra in sys.argv[1:] for line in project["optional-dependencies"][extra]), sep="\n")
