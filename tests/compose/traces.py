"""What a Docker daemon leaves on a machine when it ends: rules and chains of the firewall, bridges, a setting of the
kernel, files outside its own folder. Noted before it starts, undone when it has ended.
"""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 30.0
# The firewall of both protocols, as text, and back.
FIREWALLS = {"iptables-save": "iptables-restore", "ip6tables-save": "ip6tables-restore"}
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
LINKS = Path("/sys/class/net")
# Outside of what a daemon's options move; a folder goes only when it is empty.
PLACES = ("/etc/docker/key.json", "/etc/docker", "/run/docker/plugins", "/run/docker")
# Of a rule or a chain that is Docker's; a published port makes the last kind. What somebody else has added stays.
_DOCKERS = re.compile(r"DOCKER|\bdocker0\b|\bbr-[0-9a-f]{12}\b|-s (\S+) -d \1 .*-j MASQUERADE")
# Of a table that nobody has used.
_POLICY = "ACCEPT"
_BRIDGE = re.compile(r"docker0|br-[0-9a-f]{12}")


@dataclass(frozen=True)
class Traces:
    """All of that at one moment."""

    # By the program that says them.
    rules: Mapping[str, str]
    bridges: frozenset[str]
    forwarding: str
    places: frozenset[str]


def look() -> Traces:
    """What is there now. Raises: OSError, subprocess.SubprocessError: it can't be said."""
    rules = {program: _output(program) for program in FIREWALLS if shutil.which(program) is not None}
    bridges = frozenset(link.name for link in LINKS.iterdir() if _BRIDGE.fullmatch(link.name))
    places = frozenset(place for place in PLACES if Path(place).exists())
    return Traces(rules, bridges, FORWARDING.read_text(), places)


def undo(before: Traces) -> list[str]:
    """Take away what is there now and wasn't before; what can't be taken away, a line each."""
    now = look()
    for program, text in now.rules.items():
        if commands := undoing(before.rules.get(program, ""), text):
            _run(FIREWALLS[program], "--noflush", said=commands)
    for bridge in now.bridges - before.bridges:
        _run("ip", "link", "delete", bridge)
    if now.forwarding != before.forwarding:
        FORWARDING.write_text(before.forwarding)
    for place in (Path(place) for place in PLACES if place in now.places - before.places):
        if not place.is_dir():
            place.unlink()
        elif not any(place.iterdir()):
            place.rmdir()
    return left(before, look())


def left(before: Traces, now: Traces) -> list[str]:
    """What of Docker's is there now and wasn't before, a line each."""
    rules = [
        f"{program.removesuffix('-save')}: {line}"
        for program, text in now.rules.items()
        for line in undoing(before.rules.get(program, ""), text).splitlines()
    ]
    forwarding = [f"{FORWARDING} was {before.forwarding.strip()}"] if now.forwarding != before.forwarding else []
    return [*rules, *sorted(now.bridges - before.bridges), *forwarding, *sorted(now.places - before.places)]


def undoing(before: str, now: str) -> str:
    """What iptables-restore is to be told so that Docker's part of the rules is again as it was; "" if it is.

    Both are what iptables-save says. A chain that was there keeps its name, and loses what was added to it.
    """
    old_chains, old_rules = _parsed(before)
    new_chains, new_rules = _parsed(now)
    found = []
    for table, chains in new_chains.items():
        known = old_chains.get(table, {})
        made = [chain for chain in chains if chain not in known and _DOCKERS.search(chain)]
        added = new_rules[table] - old_rules.get(table, Counter())
        lines = [
            f":{chain} {known.get(chain, _POLICY)}"
            for chain, policy in chains.items()
            if policy not in ("-", known.get(chain, _POLICY))
        ]
        lines += [
            f"-D {rule}" for rule in added.elements() if _DOCKERS.search(rule) and rule.split(maxsplit=1)[0] not in made
        ]
        lines += [f"-F {chain}" for chain in made] + [f"-X {chain}" for chain in made]
        if lines:
            found += [f"*{table}", *lines, "COMMIT"]
    return "".join(f"{line}\n" for line in found)


def _parsed(saved: str) -> tuple[dict[str, dict[str, str]], dict[str, Counter[str]]]:
    """By table: chain -> policy ("-" if it can have none), and the rules without their `-A`."""
    chains: dict[str, dict[str, str]] = {}
    rules: dict[str, Counter[str]] = {}
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
            chains[table], rules[table] = {}, Counter()
        elif line.startswith(":"):
            name, policy, *_ = line[1:].split()
            chains[table][name] = policy
        elif line.startswith("-A "):
            rules[table][line[3:].strip()] += 1
    return chains, rules


def _output(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


def _run(*argv: str, said: str | None = None) -> None:
    """What it couldn't do is seen afterwards."""
    subprocess.run(argv, check=False, capture_output=True, text=True, input=said, timeout=LIMIT_S)
