"""docs/reliability.md: results of the fault matrix, the ledger and the soak.

Figures collect in runs/reliability.json. The tables between the page's marks show what that file
holds, so keep it until all rows of a table were played again. A cell that did not run says so.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from faults import FAULTS, LIMITED, ON_HOSTS, STARVED
from stack import PHASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reliability.md"
FIGURES = ROOT / "runs/reliability.json"
ALL_FAULTS = (*FAULTS, *ON_HOSTS)
ROWS = (
    *("redis", "launcher", "router", "server", "trainer", "rank", "runner"),
    *("archiver", "sandbox"),
)
WITHOUT_NETWORK = ("launcher", "archiver", "sandbox", "rank")


def _read() -> dict[str, Any]:
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def _stamp() -> dict[str, Any]:
    """When it ran, and how much else did: two cores are busy at a load of 2."""
    return {"date": time.strftime("%Y-%m-%d"), "load": round(os.getloadavg()[1], 1)}


def record_cell(name: str, figures: Mapping[str, Any]) -> None:
    """One cell of the fault matrix, `PART/FAULT/PHASE`."""
    _record("faults", name, figures)


def record_audit(names: Sequence[str], verdict: str) -> None:
    """Of the run in which these cells of the fault matrix were played."""
    tree = _read()
    for name in names:
        tree["faults"][name]["audit"] = verdict
    _write(tree)


def record_ledger(figures: Mapping[str, Any]) -> None:
    """Of a run that was killed many times."""
    _record("ledger", "run", figures)


def record_soak(figures: Mapping[str, Any]) -> None:
    """Of the last soak."""
    _record("soak", "run", figures)


def record_hosts(name: str, figures: Mapping[str, Any]) -> None:
    """One fault of a run over several hosts."""
    _record("hosts", name, figures)


def _record(section: str, name: str, figures: Mapping[str, Any]) -> None:
    tree = _read()
    tree.setdefault(section, {})[name] = {**figures, **_stamp()}
    _write(tree)


def _write(tree: Mapping[str, Any]) -> None:
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(tree, indent=1) + "\n")
    write_page()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_page() -> None:
    """Put the tables of FIGURES between the page's marks."""
    if not PAGE.exists():
        return
    tree, text = _read(), PAGE.read_text()
    for name, make in (
        ("faults", _faults),
        ("ledger", _ledger),
        ("soak", _soak),
        ("hosts", _hosts),
    ):
        if name not in tree:
            continue
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{make(tree[name])}\n\n{end}{after}"
    PAGE.write_text(text)


def _faults(cells: Mapping[str, Any]) -> str:
    """An overview, part by fault, and a line for each fault of a part with each phase."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, cell in sorted(cells.items()):
        part, kind, phase = name.split("/")
        found.setdefault((part, kind), {})[phase] = cell
    overview = [
        [
            part,
            *(
                _overview(part, kind, list(found.get((part, kind), {}).values()))
                for kind in ALL_FAULTS
            ),
        ]
        for part in ROWS
    ]
    lines = [
        [
            *(part, kind, *(_back(by_phase.get(phase)) for phase in PHASES)),
            *_over_all(list(by_phase.values())),
        ]
        for (part, kind), by_phase in sorted(found.items())
    ]
    header = ["part", "fault", *PHASES, "first sign, at the latest", "steps meanwhile"]
    return "\n\n".join(
        (
            table(["part", *ALL_FAULTS], overview),
            table(
                [*header, "lost, at most", "audit", "load, date"],
                [[_plain(word) for word in line] for line in lines],
            ),
        )
    )


def _plain(word: str) -> str:
    return word.replace("\n", " ").replace("|", "/")


def _back(cell: Mapping[str, Any] | None) -> str:
    """After how long it trained again, of a fault that began in this phase."""
    if cell is None:
        return "not run"
    if "failed" in cell:
        return f"**failed**: {cell['failed'][:120]}"
    return f"{cell['back_s']} s{' (any)' if cell['phase'] == 'any' else ''}"


def _over_all(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """First sign, steps meanwhile, lost, audit, load and date of one fault in several phases."""
    signs = sorted((cell["noticed_s"], cell["sign"][:80]) for cell in cells if cell.get("sign"))
    steps = [cell["steps_meanwhile"] for cell in cells if "steps_meanwhile" in cell]
    most: dict[str, int] = {}
    for cell in cells:
        for what, number in cell.get("lost", {}).items():
            most[what] = max(number, most.get(what, 0))
    lost = [f"{number} {what}" for what, number in most.items()]
    num_ended = sum(bool(cell.get("run_ended")) for cell in cells)
    if num_ended:
        lost.append(f"the run ended and was started again ({num_ended} of {len(cells)})")
    latest = [f"{signs[-1][0]} s: {signs[-1][1]}"] if signs else []
    num_without = sum(cell.get("sign") == "" for cell in cells)
    none = [f"nothing ({num_without} of {len(cells)})"] if num_without else []
    audits = {cell.get("audit", "not noted")[:120] for cell in cells}
    loads = _range([cell["load"] for cell in cells])
    return [
        *("; ".join([*latest, *none]), _range(steps), ", ".join(lost) or "nothing"),
        *("; ".join(sorted(audits)), f"{loads}, {max(cell['date'] for cell in cells)}"),
    ]


def _range(numbers: Sequence[float]) -> str:
    """Lowest and highest."""
    if not numbers:
        return ""
    lowest, highest = min(numbers), max(numbers)
    return f"{lowest}" if lowest == highest else f"{lowest} to {highest}"


def _overview(part: str, kind: str, cells: Sequence[Mapping[str, Any]]) -> str:
    if kind == "partitioned" and part in WITHOUT_NETWORK:
        return "-"
    if kind in LIMITED and part == "sandbox":
        return "-"
    if not cells:
        return "not run"
    if any("failed" in cell for cell in cells):
        return "**failed**"
    if kind == STARVED and not any(cell["was_killed"] for cell in cells):
        return "not killed"
    return f"{max(cell['back_s'] for cell in cells)} s ({len(cells)})"


def _hosts(cells: Mapping[str, Any]) -> str:
    rows = [
        [
            *name.split("/"),
            f"{cell['hold_s']:.0f} s",
            str(cell["steps_meanwhile"]),
            f"{cell['back_s']} s" if "back_s" in cell else f"**failed**: {cell['failed']}",
            f"{cell['load']}, {cell['date']}",
        ]
        for name, cell in cells.items()
    ]
    header = ["host", "what happens", "for", "steps meanwhile", "back after it"]
    return table([*header, "load, date"], rows) if rows else "Not run."


def _soak(cells: Mapping[str, Any]) -> str:
    if not cells:
        return "Not run."
    found = cells["run"]
    rows = [
        [name, *(f"{number:,.1f}" for number in found["series"][name]), _slope(found, name)]
        for name in found["series"]
    ]
    # Those of before are slopes over the whole time.
    over = "last half, " if "staying" in found else ""
    sentence = (
        f"{found['minutes']:.0f} minutes, {found['num_steps']} steps, {found['num_faults']} faults "
        f"({', '.join(f'{number} {name}' for name, number in found['faults'].items())}); load "
        f"{found['load']}, {found['date']}. {found['verdict']}"
    )
    if "silence_s" in found:
        sentence += f" The longest time without a step was {found['silence_s']:.1f} s."
    return (
        sentence
        + "\n\n"
        + table(["measured", "first third", "second", "last", f"{over}by hour, 95 %"], rows)
        + _staying(found)
    )


def _staying(found: Mapping[str, Any]) -> str:
    """Which keys of Redis that do not expire were the largest at the end."""
    if not found.get("staying"):
        return ""
    sizes = ", ".join(f"`{kind}` {size / 1e3:,.1f}" for kind, size in found["staying"].items())
    return f"\n\nKB in Redis that stay, at the end: {sizes}."


def _slope(found: Mapping[str, Any], name: str) -> str:
    slope = found["slopes"].get(name)
    return "not known" if slope is None else f"{slope[0]:+,.1f} +- {slope[1]:,.1f}"


def _ledger(cells: Mapping[str, Any]) -> str:
    if not cells:
        return "Not run."
    found = cells["run"]
    kills = ", ".join(f"{name} {number}" for name, number in sorted(found["kills"].items()))
    slots = table(
        [
            *("kills", "task slots reached", "trained", "trained twice"),
            *("to be played, or in flight", "dropped with a reason", "lost"),
        ],
        [
            [
                f"{sum(found['kills'].values())} ({kills})",
                *(str(found[name]) for name in ("reached", "trained", "duplicated")),
                *(str(found[name]) for name in ("to_play_or_open", "dropped")),
                "0",
            ]
        ],
    )
    bounds = sorted(
        {float(b) for column in found["columns"].values() for b in column["by_duration"]}
    )
    rows = [
        [
            name,
            str(column["num_attempts"]),
            *(str(column["by_duration"].get(str(bound), 0)) for bound in bounds),
        ]
        for name, column in sorted(found["columns"].items())
    ]
    header = ["attempts", "number", *(f"to {bound:g} s" for bound in bounds)]
    return (
        f"{slots}\n\n{found['attempts_started']} attempts were started; load {found['load']}, "
        f"{found['date']}.\n\n{table(header, rows)}"
    )
