"""What is done with a trained run: scoring it again and predicting new volumes."""

from fasttrain.delivery.evaluate import evaluate
from fasttrain.delivery.evaluation import evaluate_in_full
from fasttrain.delivery.predict import predict
from fasttrain.delivery.trained import mirrored, open_run

__all__ = ["evaluate", "evaluate_in_full", "mirrored", "open_run", "predict"]
