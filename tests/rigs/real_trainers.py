"""Checkpoints by the real libraries, and a Run that goes on from each. Arguments: "huggingface" or "lightning", and a folder.

Prints one line of JSON: what the source held, what the live objects hold after `Run(start_from=)`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

import unbroken


def sums(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Bits of all parameters and of their moments, in order, as numbers."""
    found: dict[str, Any] = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            found[f"{len(group['params'])}.{i}"] = [v.double().sum().item() for v in optimizer.state.get(parameter, {}).values()]
        found[f"lr of {len(group['params'])}"] = group["lr"]
    return found


def opened(folder: str, source: str, model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """The Run's own report, and what it holds then."""
    data = unbroken.Batches(torch.utils.data.TensorDataset(torch.zeros(8, 4)), global_batch=4, seed=1)
    run = unbroken.Run(folder, model=model, optimizer=optimizer, scheduler=scheduler, data=data, start_from=source)
    origin = unbroken.open(folder) if run.completed else None
    found = {"live": sums(model, optimizer), "epoch": scheduler.last_epoch, "started": origin is None}
    run.close()
    return found | {"born": unbroken.open(folder).facts.options["started_from"]}


def huggingface(folder: str) -> dict[str, Any]:
    """A tiny GPT-2, four steps, a checkpoint after the second and the fourth."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def trainer() -> Any:
        config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
        arguments = TrainingArguments(
            output_dir=f"{folder}/hf", max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
            disable_tqdm=True, logging_strategy="no", weight_decay=0.1,
        )  # fmt: skip
        data = [{"input_ids": torch.arange(8) % 16, "labels": torch.arange(8) % 16} for _ in range(16)]
        return Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data)

    torch.manual_seed(1)
    first = trainer()
    first.train()
    expected = {"saved": sums(first.model, first.optimizer.optimizer if hasattr(first.optimizer, "optimizer") else first.optimizer)}
    torch.manual_seed(2)
    second = trainer()
    second.create_optimizer_and_scheduler(4)
    return expected | opened(f"{folder}/run", f"{folder}/hf", second.model, second.optimizer, second.lr_scheduler)


def lightning(folder: str) -> dict[str, Any]:
    """A module of two layers, four steps, one file."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.model(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            self.adam = torch.optim.AdamW(self.parameters(), lr=1e-2)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.adam, 1)
            return [self.adam], [self.schedule]

    torch.manual_seed(1)
    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))  # the inner one, without Lightning
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = {"saved": sums(module.model, module.adam)}
    return expected | opened(f"{folder}/run", f"{folder}/a.ckpt", model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))


if __name__ == "__main__":
    print(json.dumps({"huggingface": huggingface, "lightning": lightning}[sys.argv[1]](sys.argv[2])))
