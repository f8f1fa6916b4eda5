"""What is done with a trained run: scoring it again and predicting new volumes."""

from fasttrain.delivery.evaluate import evaluate
from fasttrain.delivery.predict import predict
from fasttrain.delivery.trained import open_run

__all__ = ["evaluate", "open_run", "predict"]
