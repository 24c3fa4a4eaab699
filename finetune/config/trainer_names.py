"""What transformers' ``TrainingArguments`` and its examples call an option of ours."""

OPTION_OF_TRAINER = {
    "bf16": "precision",
    "dataset_name": "data",
    "epochs": "num_train_epochs",
    "fp16": "precision",
    "gradient_accumulation_steps": "effective_batch_size",
    "lr": "learning_rate",
    "max_seq_length": "max_length",
    "model_name": "model",
    "model_name_or_path": "model",
    "no_cuda": "device",
    "optim": "optimizer",
    "overwrite_output_dir": "overwrite",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "batch_size",
    "train_file": "data",
    "use_cpu": "device",
    "use_mps_device": "device",
    "warmup_ratio": "warmup_fraction",
    "warmup_steps": "warmup_fraction",
}
