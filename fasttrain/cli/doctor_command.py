"""Owns `doctor`: what the machine has for training, what is slow there and what is broken, as lines or a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fasttrain.cli.printing import print_json, print_table
from fasttrain.cli.run_commands import JsonOption
from fasttrain.errors import EXIT_DONE, EXIT_MACHINE

if TYPE_CHECKING:
    from fasttrain.machine.diagnosis import Finding


def doctor_command(json: JsonOption = False) -> int:
    """Look at the machine: torch, GPU, cuDNN, compiler, CPUs and memory.

    One line a matter: ok, warning (training works, but slower or in part) or fault. A small convolution really runs on each GPU.
    A machine without a GPU is a warning. Exit code 4 where there is a fault, else 0.
    """
    from fasttrain.machine.diagnosis import examine

    findings = examine()
    code = exit_code(findings)
    if json:
        shown = [{"name": one.name, "state": one.state, "told": one.told} for one in findings]
        print_json({"exit_code": code, "findings": shown})
    else:
        print_table([(one.state, one.name, one.told) for one in findings])
    return code


def exit_code(findings: list[Finding]) -> int:
    """4 where something is broken."""
    return EXIT_MACHINE if any(one.state == "fault" for one in findings) else EXIT_DONE
