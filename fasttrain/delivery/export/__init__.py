"""What a trained network is handed on as: a MONAI bundle, TorchScript, ONNX, or a program of torch.export."""

from fasttrain.delivery.export.exporting import EXPORTS, Exported, export

__all__ = ["EXPORTS", "Exported", "export"]
