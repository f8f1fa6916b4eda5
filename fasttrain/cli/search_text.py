"""Owns how a study is written for a person: one line a subject."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fasttrain.cli.figures import duration_text, one_line, share_text
from fasttrain.wording import counted

_MOST_FAILURES = 5
_MOST_VALUES = 6
_MOST_EPOCHS = 6


def rows_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(subject, text) of everything that is known."""
    wanted = f" of {found['wanted']}" if found["wanted"] else ""
    rows = [
        ("study", f"{found['name']} in {found['study']}"),
        ("storage", found["storage"]),
        ("trials", f"{found['trials']}{wanted}: {_states(found)}"),
        ("dead", _dead(found)),
        ("gone on with", counted(found["gone_on_with"], "interrupted or dead trial") if found["gone_on_with"] else ""),
        ("pruning", _pruning(found)),
        ("memory", counted(found["out_of_memory"], "trial") + " ran out of it" if found["out_of_memory"] else ""),
        ("best", _best(found)),
        ("baseline", _baseline(found)),
        ("importance", _importance(found)),
        ("device", _device(found)),
    ]
    rows += [
        ("failed", f"trial {number}: {reason}") for number, reason in list(found["failures"].items())[:_MOST_FAILURES]
    ]
    rows += [("pictures", ", ".join(found["plots"]))] if found.get("plots") else []
    return [(subject, one_line(text)) for subject, text in rows if text]


def best_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Of `search best`."""
    rows = []
    for one in document["best"]:
        own = " (the recipe's own values)" if one["baseline"] else ""
        rows.append(("trial", f"{one['trial']}: {_values(one, document['metric'])}{own}"))
        rows += [(f"  {path}", _shown(value)) for path, value in one["params"].items()]
        rows.append(("  run", one["run"]))
    if document["written"]:
        rows.append(("recipe", f"{document['written']}: fasttrain train --recipe {document['written']}"))
    return rows


def _states(found: dict[str, Any]) -> str:
    parts = []
    for state, one in found["states"].items():
        if one["count"]:
            mean = "" if one["mean_seconds"] is None else f", {duration_text(one['mean_seconds'])} on average"
            parts.append(f"{one['count']} {state} ({one['share']:.0%}{mean})")
    return "; ".join(parts) or "none yet"


def _dead(found: dict[str, Any]) -> str:
    numbers = ", ".join(map(str, found["dead"]))
    trials = "trial" if len(found["dead"]) == 1 else "trials"
    return (
        f"{trials} {numbers}, of a search that was killed; the same command again goes on from there" if numbers else ""
    )


def _pruning(found: dict[str, Any]) -> str:
    if found["pruning_rate"] is None:
        return ""
    epochs = Counter(found["pruned_after_epochs"])
    if len(epochs) <= _MOST_EPOCHS:
        after = "".join(f", {number} after epoch {epoch}" for epoch, number in sorted(epochs.items()))
    else:
        after = f", after epochs {min(epochs)} to {max(epochs)}"
    return f"{found['pruning_rate']:.0%} of the trials that ended by themselves{after}"


def _best(found: dict[str, Any]) -> str:
    if not found["best"]:
        return ""
    one = found["best"][0]
    others = len(found["best"]) - 1
    more = f"; {counted(others, 'other')} that none beats in all objectives" if others else ""
    params = list(one["params"].items())
    shown = ", ".join(f"{path}={_shown(value)}" for path, value in params[:_MOST_VALUES])
    return f"{_values(one, found['metric'])} by trial {one['trial']} with {shown}{' …' * (len(params) > _MOST_VALUES)}{more}"


def _baseline(found: dict[str, Any]) -> str:
    """How the recipe's own values did, where they are not the best."""
    own = found["baseline"]
    if own is None:
        return ""
    if own["values"] is None:
        return (
            f"trial {own['trial']} with the recipe's own values is {own['state']}" if own["state"] != "complete" else ""
        )
    if found["states"]["complete"]["count"] + found["states"]["pruned"]["count"] == 1:
        return f"trial {own['trial']} has the recipe's own values, and is the only one that has ended"
    if any(one["trial"] == own["trial"] for one in found["best"]):
        return f"none did better than the recipe's own values{' in all objectives' * (len(own['values']) > 1)}"
    return f"{_values(own, found['metric'])} by trial {own['trial']} with the recipe's own values"


def _values(one: dict[str, Any], metric: str | None) -> str:
    """metric: what the score is, where the study tells that."""
    called = {"score": metric or "score"}
    return ", ".join(f"{called.get(name, name)} {value:.4f}" for name, value in one["values"].items())


def _importance(found: dict[str, Any]) -> str:
    return ", ".join(f"{path} {share:.0%}" for path, share in (found["importance"] or {}).items())


def _device(found: dict[str, Any]) -> str:
    use = found["device"]
    if use is None:
        return ""
    at_once = use["trials_at_once"] or 1.0
    several = f", {at_once:.1f} trials at once" if at_once > 1.05 else ""
    peak = "" if use["peak_gib"] is None else f", at most {use['peak_gib']:.1f} GiB a trial"
    name = f"{use['name']} " if use["name"] else ""
    return (
        f"{name}trained {share_text(use['training_share'])} of {duration_text(use['wall_seconds'])}, trained or validated "
        f"{share_text(use['training_or_validating_share'])}{several}{peak}"
    )


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def short_rows(found: dict[str, Any]) -> str:
    """Everything that changes, on one line."""
    parts = [f"{found['name']}: {_states(found)}", _best(found), _device(found)]
    return one_line("; ".join(part for part in parts if part))
