"""Owns how a network of `monai.networks.nets` is built from its name and arguments, and the proof that it segments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from monai.networks import nets
from torch import Tensor, nn
from torch.func import functional_call

from fasttrain.errors import MachineError, RecipeError
from fasttrain.recipe.names import did_you_mean
from fasttrain.recipe.network_spec import MonaiNetworkSpec

# What MONAI's classes call the same thing
_AXES = ("spatial_dims", "dimensions")
_INPUTS = ("in_channels", "num_channels", "n_input_channels", "in_chans")
_OUTPUTS = ("out_channels", "num_classes", "out_classes")
_SIZES = ("img_size", "image_size", "input_image_size", "input_shape")
_SIZE_WITH_CHANNELS = "in_shape"
_PRETRAINED = "pretrained"
# Its constructor fetches and loads the weights of a language model
_REFUSED = ("Transchex",)
_LISTED = "; MONAI's documentation lists the networks that do"
_BATCH = 2


class MainHead(nn.Module):
    """A network with several outputs, as the trainer and the predictor want them.

    In eval mode the main output alone, in train mode all of them, the main one first and then from fine to coarse. Of several
    of full size the last is the main one: UNet++ and DAF3D refine from each to the next.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Logits [batch, output, *spatial], or a tuple of them."""
        outputs = self.network(image)
        if isinstance(outputs, Tensor):
            return outputs
        heads: tuple[Tensor, ...] = in_order(outputs, image)
        return heads if self.training and len(heads) > 1 else heads[0]


def in_order(outputs: list[Tensor] | tuple[Tensor, ...], image: Tensor) -> tuple[Tensor, ...]:
    """Heads of the image's size, the last of them first, then the others from fine to coarse."""
    full = [head for head in outputs if head.shape[2:] == image.shape[2:]]
    coarse = [head for head in outputs if head.shape[2:] != image.shape[2:]]
    return (*reversed(full), *sorted(coarse, key=lambda head: -head[0, 0].numel()))


def build_by_name(spec: MonaiNetworkSpec, patch: tuple[int, ...], channels: int, outputs: int) -> nn.Module:
    """The class `spec.name` of `monai.networks.nets`, and of nothing else, with `spec.arguments`.

    The numbers of axes, inputs and outputs are filled in under the names that the class has for them, the patch where it asks
    for a size. Weights are never fetched. Raises RecipeError for an unknown name or argument, for arguments that the class
    refuses, and for a network that does not make logits [batch, output, *spatial] of a patch; MachineError where MONAI
    lacks a package for it.
    """
    network_class = _find_class(spec.name)
    arguments = _all_arguments(spec, network_class, patch, channels, outputs)
    try:
        network: nn.Module = network_class(**arguments)
    except Exception as error:
        raise _explained(spec.name, "arguments", "cannot be built of these", error) from error
    several = _check_outputs(spec.name, network, (_BATCH, channels, *patch), outputs)
    return MainHead(network) if several else network


def by_name_arguments(spec: MonaiNetworkSpec, patch: tuple[int, ...], channels: int, outputs: int) -> dict[str, Any]:
    """What the class of MONAI's is called with."""
    return _all_arguments(spec, _find_class(spec.name), patch, channels, outputs)


def _find_class(name: str) -> type[nn.Module]:
    known = {
        key: value
        for key, value in vars(nets).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and key not in _REFUSED
    }
    if name in known:
        return known[name]
    # Aliases such as `Unet` are understood and not offered
    offered = [key for key, value in known.items() if value.__name__ == key]
    what = "is no network" if hasattr(nets, name) else "does not exist"
    raise RecipeError(f"network.name: {name} {what} in monai.networks.nets{did_you_mean(name, offered) or _LISTED}")


def _parameters_of(network_class: type[nn.Module]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The constructor's parameters, with those of the base classes that it hands `**kwargs` to; True where there are more."""
    found: dict[str, inspect.Parameter] = {}
    for one in network_class.__mro__:
        if "__init__" not in vars(one):
            continue
        parameters = list(inspect.signature(one).parameters.values())
        found = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} | found
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return found, False
    return found, True


def _all_arguments(
    spec: MonaiNetworkSpec, network_class: type[nn.Module], patch: tuple[int, ...], channels: int, outputs: int
) -> dict[str, Any]:
    known, open_ended = _parameters_of(network_class)
    filled: dict[str, Any] = {}
    faults: list[str] = []
    for names, value, what in ((_INPUTS, channels, "input"), (_OUTPUTS, outputs, "output")):
        place = next((name for name in names if name in known), None)
        if place is None:
            faults.append(
                f"network.name: {spec.name} has no argument for the number of {what} channels, so it does not segment; "
                "choose another class of monai.networks.nets"
            )
        else:
            filled[place] = value
    filled |= {name: len(patch) for name in _AXES if name in known}
    faults += [
        f"network.arguments.{name}: is filled in from the recipe, as {filled[name]}; leave it out"
        for name in filled
        if name in spec.arguments
    ]
    if spec.arguments.get(_PRETRAINED):
        faults.append(f"network.arguments.{_PRETRAINED}: weights are never fetched from elsewhere; leave it out")
    if _PRETRAINED in known:
        filled[_PRETRAINED] = False
    sizes = {name: patch for name in _SIZES if name in known} | {_SIZE_WITH_CHANNELS: (channels, *patch)}
    filled |= {name: size for name, size in sizes.items() if name in known and name not in spec.arguments}
    unknown = [] if open_ended else [name for name in spec.arguments if name not in known]
    open_names = [name for name in known if name not in filled]
    faults += [
        f"network.arguments.{name}: {spec.name} has no such argument{did_you_mean(name, open_names)}"
        for name in unknown
    ]
    # What a base class needs its subclass may give it
    own = inspect.signature(network_class).parameters
    lacking = [
        name
        for name, p in known.items()
        if name in own and p.default is p.empty and name not in filled and name not in spec.arguments
    ]
    if lacking:
        faults.append(f"network.arguments: lacks {', '.join(lacking)}, which {spec.name} needs")
    if faults:
        raise RecipeError(faults)
    return {name: _as_tuples(value) for name, value in spec.arguments.items()} | filled


def _as_tuples(value: Any) -> Any:
    """Lists as tuples, which MONAI takes everywhere."""
    if isinstance(value, list | tuple):
        return tuple(_as_tuples(item) for item in value)
    return {key: _as_tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


def _check_outputs(name: str, network: nn.Module, shape: tuple[int, ...], outputs: int) -> bool:
    """True where one mode or the other gives several outputs; raises RecipeError where any is no map of logits."""
    in_training, in_eval = (_outputs_in(name, network, shape, training) for training in (True, False))
    for made, mode in ((in_training, "training"), (in_eval, "prediction")):
        heads = made if isinstance(made, list | tuple) else [made]
        sound = [head for head in heads if _is_logits(head, shape, outputs)]
        full = [head for head in sound if tuple(head.shape[2:]) == shape[2:]]
        # Coarser maps have a use while training only; an autoencoder's are no logits at all
        if not full or len(sound if mode == "training" else full) < len(heads):
            raise RecipeError(
                f"network.name: {name} makes {_described(made)} of a patch {list(shape)} in {mode}, and "
                f"[{shape[0]}, {outputs}, {', '.join(map(str, shape[2:]))}] is needed; choose another class or other "
                "network.arguments"
            )
    counts = [len(made) if isinstance(made, list | tuple) else 1 for made in (in_training, in_eval)]
    if counts[1] not in (1, counts[0]):
        raise RecipeError(
            f"network.name: {name} makes {counts[0]} maps in training and {counts[1]} in prediction, so that which one is the "
            "answer is not known; use other network.arguments"
        )
    return any(isinstance(made, list | tuple) for made in (in_training, in_eval))


def _is_logits(head: Any, shape: tuple[int, ...], outputs: int) -> bool:
    """Of the patch's size, or of a coarser one that a label can be thinned out to."""
    if not isinstance(head, Tensor) or head.ndim != len(shape) or tuple(head.shape[:2]) != (shape[0], outputs):
        return False
    return not any(size % coarse if coarse else True for size, coarse in zip(shape[2:], head.shape[2:], strict=True))


def _outputs_in(name: str, network: nn.Module, shape: tuple[int, ...], training: bool) -> Any:
    """What a patch becomes, by shapes alone where the network allows it, else by a pass on the CPU; changes nothing."""
    was = network.training
    network.train(training)
    state = dict(network.named_parameters()) | dict(network.named_buffers())
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                shapes = {key: tensor.to("meta") for key, tensor in state.items()}
                return functional_call(network, shapes, (torch.empty(shape, device="meta"),))
            except Exception:
                # Values that steer the pass, or tensors that are no parameters: only a true pass can tell
                copies = {key: tensor.clone() for key, tensor in state.items()}
                return functional_call(network, copies, (torch.zeros(shape),))
    except Exception as error:
        raise _explained(name, "name", f"cannot take a patch {list(shape)}", error) from error
    finally:
        network.train(was)


def _explained(name: str, key: str, what: str, error: Exception) -> Exception:
    """The user's sentence for what a class of MONAI raises, which may be anything; memory that ran out is told elsewhere."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return error
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        missing = text.split(". For details")[0]
        return MachineError(f"network.name: {name} needs a package that is not installed: {missing}")
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return RecipeError(f"network.{key}: {name} {what}: {type(error).__name__}: {shown}")


def _described(made: Any) -> str:
    if isinstance(made, Tensor):
        return f"{list(made.shape)}"
    if isinstance(made, list | tuple):
        return f"a {type(made).__name__} of {len(made)} ({', '.join(map(_described, made[:3]))}{', …' if len(made) > 3 else ''})"
    return f"a {type(made).__name__}"
