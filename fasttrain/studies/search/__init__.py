"""Search of hyper-parameters by Optuna: each trial an ordinary run in its own folder, in processes that load torch once."""
