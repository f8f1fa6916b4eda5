"""Owns the assembly of a run from recipe, plan and machine; nothing else puts the parts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fasttrain.batches import LoaderSource, Loading, Order, Resident, ResidentSource, WindowOrder
from fasttrain.data.caches import SmartCache, Told
from fasttrain.data.made_ahead import MadeAhead
from fasttrain.data.splits import Split
from fasttrain.engine.checkpointing import checkpoint_blocks
from fasttrain.engine.opening import CaseProgress, open_all
from fasttrain.engine.optimisation.ema import Ema
from fasttrain.engine.optimisation.optim import build_optimizer, learning_rate
from fasttrain.engine.phases import BUILDING, FILLING
from fasttrain.engine.planning.plan import Plan
from fasttrain.engine.planning.trial import Candidate, precision_of
from fasttrain.engine.planning.worker_plan import cutting_threads
from fasttrain.engine.state import TrainState
from fasttrain.engine.step import Step, unpacking
from fasttrain.engine.together import DataParallel
from fasttrain.engine.trainer import Trainer
from fasttrain.engine.validating.inference import Predictor
from fasttrain.engine.validating.validation import Validator
from fasttrain.losses import loss_of
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.compiler import keep_compiled
from fasttrain.machine.hardware import Hardware
from fasttrain.machine.place import Place
from fasttrain.machine.ranks import ONLY_ONE, Ranks
from fasttrain.networks import build_network
from fasttrain.networks.fused import fuse
from fasttrain.recipe import Recipe
from fasttrain.samples import BatchSource, CaseSource


@dataclass(frozen=True)
class Assembly:
    """The parts of a run."""

    state: TrainState
    trainer: Trainer
    validator: Validator

    def close(self) -> None:
        """Ends workers and gives up the cases."""
        self.trainer.close()
        self.validator.close()


def prepare_torch(plan: Plan, hardware: Hardware) -> None:
    """Sets what torch keeps for the whole process."""
    if plan.compile or plan.fused_layers or plan.cache == "gpu":
        keep_compiled(own_cache_folder())
    if hardware.on_gpu:
        torch.cuda.set_device(hardware.torch_device)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = plan.tf32
        torch.backends.cudnn.allow_tf32 = plan.tf32


def build_predictor(recipe: Recipe, choice: Candidate, hardware: Hardware) -> Predictor:
    """A network with fresh weights on the device, in the precision and layout of `choice`, ready to train or to predict.

    The generators are seeded first, so that the weights are a function of `training.seed` alone.
    """
    torch.manual_seed(recipe.training.seed)
    network = build_network(recipe.network, recipe.patch.size, recipe.input_channels, recipe.output_channels)
    precision = precision_of(choice, hardware.torch_device.type, recipe.dimensions)
    if recipe.training.sync_batch_norm and hardware.ranks > 1:
        network = torch.nn.SyncBatchNorm.convert_sync_batchnorm(network)
    network.to(hardware.torch_device)
    if choice.fused:
        fuse(network)
    precision.lay_out_network(network)
    return Predictor(network, recipe, precision, hardware.torch_device)


def build(
    recipe: Recipe,
    plan: Plan,
    hardware: Hardware,
    split: Split,
    progress: CaseProgress,
    told: Told,
    epoch: int = 0,
    entered: Callable[[str], None] = lambda phase: None,
    ahead: MadeAhead | None = None,
    ranks: Ranks = ONLY_ONE,
) -> Assembly:
    """Reads and checks every case, then puts the parts together for a run that goes on in `epoch` (from 0).

    `told` hears what a cache has to say, `entered` which phase begins; `ahead` has volumes that were begun. Of several
    `ranks` each builds its own, with the same weights. Raises DataError with every faulty case.
    """
    entered(FILLING)
    training, validation = open_all(recipe, plan, split, hardware, progress, told, epoch, ahead, ranks)
    entered(BUILDING)
    predictor = build_predictor(recipe, Candidate(plan.amp, plan.channels_last, plan.fused_layers), hardware)
    network, average = predictor.network, recipe.training.ema
    ema = Ema(network, average.decay) if average is not None else None
    if ema is not None:
        predictor = Predictor(ema.network, recipe, predictor.precision, hardware.torch_device)
    if plan.activation_checkpointing:
        checkpoint_blocks(network)
    step = Step(
        network,
        loss_of(recipe, plan.fused_layers).to(hardware.torch_device),
        build_optimizer(recipe.optimizer, network.parameters(), plan.fused_optimizer),
        predictor.precision,
        recipe.training.accumulate,
        recipe.training.clip_norm,
        ema,
        plan.compile,
        plan.cuda_graphs,
        unpacking(recipe),
        None if ranks.place.alone else _together(ranks.place, recipe),
    )
    state = TrainState(step)
    state.progress.effective_batch, state.progress.epoch_steps = plan.sizes.effective_batch, plan.sizes.steps_per_epoch
    source = _batches(recipe, plan, training, hardware, [case.name for case in split.train], told, ranks.place)
    rate = learning_rate(recipe.schedule, recipe.optimizer.learning_rate, plan.sizes.total_steps)
    trainer = Trainer(state, source, rate, plan.sizes.steps_per_epoch)
    validator = Validator(
        predictor,
        validation,
        split.validation,
        recipe,
        keep_labels=plan.cache in ("memory", "gpu"),
        keep_predictions=recipe.output.pictures != "off",
        ranks=ranks,
    )
    return Assembly(state, trainer, validator)


def _together(place: Place, recipe: Recipe) -> DataParallel:
    return DataParallel(place.ranks, recipe.training.accumulate, place.rank, recipe.training.seed)


def _batches(
    recipe: Recipe,
    plan: Plan,
    training: CaseSource | Resident,
    hardware: Hardware,
    names: Sequence[str],
    told: Told,
    place: Place,
) -> BatchSource:
    samples, seed = recipe.data.samples_per_case, recipe.training.seed
    per_epoch = plan.sizes.steps_per_epoch * plan.sizes.effective_batch
    order = Order(len(training), samples, seed)
    if isinstance(training, Resident):
        return ResidentSource(recipe, training, order, hardware.torch_device, cutting_threads(hardware), place)
    if isinstance(training, SmartCache):
        order = WindowOrder(training.window.of, samples, seed, per_epoch, place.ranks, recipe.training.batch_size)
    loading = Loading(
        workers=plan.workers,
        kind="thread" if plan.worker_kind == "thread" else "process",
        prefetch_factor=plan.prefetch_factor,
        pin_memory=plan.pin_memory,
        copy_stream=plan.copy_stream,
    )
    return LoaderSource(recipe, training, order, hardware.torch_device, loading, per_epoch, names, told, place)
