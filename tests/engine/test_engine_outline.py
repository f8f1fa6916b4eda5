"""The line that says what is trained: parameters are those of the network that is built, and nothing is drawn for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fasttrain.cli.figures import start_lines
from fasttrain.engine import outline
from fasttrain.engine.outline import outline_of
from fasttrain.engine.run import RunResult
from fasttrain.errors import RecipeError
from fasttrain.networks import build_network
from fasttrain.telemetry.event_log import read_events
from fasttrain.telemetry.events import RunStarted

NETWORKS = {
    "dynunet 4-8-8": {"kind": "dynunet", "features": [4, 8, 8], "strides": [2, 2], "deep_supervision": 1},
    "unet 4-8": {"kind": "unet", "features": [4, 8], "strides": [2]},
    "segresnet 8-16": {"kind": "segresnet", "init_filters": 8, "blocks_down": [1, 1], "blocks_up": [1]},
    "swinunetr 12-24-48-96-192": {
        "kind": "swinunetr",
        "feature_size": 12,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 2, 2, 4],
    },
    "AttentionUnet": {"kind": "monai", "name": "AttentionUnet", "arguments": {"channels": [4, 8], "strides": [2]}},
}


@pytest.mark.parametrize("told", NETWORKS)
def test_parameters_are_those_of_the_network(tiny, told: str) -> None:
    recipe = tiny(network=NETWORKS[told], patch__size=[64, 64, 64]).recipe
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = outline_of(recipe)
    assert torch.equal(before, torch.get_rng_state())
    network = build_network(recipe.network, recipe.patch.size, 1, recipe.output_channels)
    assert found.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert found.text.startswith(f"{told}, ")


LIGHT = """
import sys
from fasttrain.engine.outline import outline_of
from fasttrain.recipe import resolve
print(outline_of(resolve("hippocampus").recipe).parameters)
print([name for name in ("torch._dynamo", "sympy", "scipy.signal", "matplotlib") if name in sys.modules])
"""


def test_counting_loads_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["5600963", "[]"]


def test_the_line_names_what_decides_the_learning(tiny) -> None:
    text = outline_of(tiny(training__ema__decay=0.99).recipe).text
    assert text.endswith(" k parameters; loss dice_ce; adamw 0.003, cosine after a warm-up of 10%; EMA 0.99")
    plain = outline_of(tiny(schedule={"kind": "poly"}, optimizer={"kind": "sgd"}).recipe).text
    assert plain.endswith("; loss dice_ce; sgd 0.01, poly")


@pytest.mark.parametrize(
    ("number", "text"), [(412, "412"), (8_300, "8.3 k"), (5_640_000, "5.64 M"), (31_189_443, "31.2 M")]
)
def test_numbers_are_short(number: int, text: str) -> None:
    assert outline._number_text(number) == text


def test_arguments_that_monai_refuses_are_the_recipes_fault(tiny) -> None:
    wrong = {"kind": "monai", "name": "AttentionUnet", "arguments": {"channels": [4, 8], "strides": [2], "no_such": 1}}
    with pytest.raises(RecipeError, match="network"):
        outline_of(tiny(network=wrong).recipe)


def test_a_run_keeps_it(whole_run: RunResult) -> None:
    plan = json.loads((Path(whole_run.run) / "plan.json").read_text())
    assert plan["parameters"] > 1000
    (started,) = [
        event for event in read_events(Path(whole_run.run) / "events.jsonl") if event["event"] == "RunStarted"
    ]
    assert started["outline"] == plan["outline"]


def test_a_start_says_it_and_counts_one_as_one() -> None:
    lines = start_lines(RunStarted("runs/x", "demo", "a CPU", 1, 1, 3, 1, outline="dynunet 4-8, 9 k parameters"))
    assert lines[0] == "demo on a CPU: 1 epoch of 1 step, 3 training and 1 validation case"
    assert lines[2] == "network: dynunet 4-8, 9 k parameters"
