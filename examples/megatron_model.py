"""A small megatron-core GPT with all that its training changes, and their form in a Megatron checkpoint, for ``megatron_gpt.py``.

The model is built of megatron-core's own layers (the "local" ones, which need no TransformerEngine), tensor parallel; ranks
beyond that are data parallel. The optimizer is torch's AdamW, which megatron-core can shard as it shards the model's
parameters. Megatron is imported when a :class:`Training` is made, so that :func:`megatron_on_cpu.prepare` can come before.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist


class Training:
    """Model, optimizer, schedule and random state, and their form in a Megatron checkpoint."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tensor_parallel)
        self.data_group = parallel_state.get_data_parallel_group()
        self.data_rank, self.data_size = dist.get_rank(self.data_group), dist.get_world_size(self.data_group)
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self._tensor_size = options.tensor_parallel
        # The first seed is the one of the weights, which Megatron makes on the CPU here; the second of dropout.
        torch.manual_seed(options.seed)
        model_parallel_cuda_manual_seed(options.seed)
        self._tracker = get_cuda_rng_tracker()
        config = TransformerConfig(
            num_layers=options.layers,
            hidden_size=options.hidden,
            num_attention_heads=options.hidden // 16,
            hidden_dropout=options.dropout,
            attention_dropout=options.dropout,
            tensor_model_parallel_size=options.tensor_parallel,
            use_cpu_initialization=True,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=256,
            max_sequence_length=options.sequence,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=True,
        )
        self.model: Any = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=(0.9, 0.95))
        # A constant rate after the warm-up does not depend on --steps: a longer run has the same losses at the same steps.
        self.schedule = OptimizerParamScheduler(
            self.optimizer,  # asked for nothing but its parameter groups
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.lr,
            lr_warmup_steps=10,
            lr_decay_steps=1 << 30,
            lr_decay_style="constant",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        rows = torch.arange(options.sequence, device=device)
        self._positions = rows.expand(options.batch, -1)
        self._hidden = (rows[None, :] > rows[:, None])[None, None]  # what a byte may not look at

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """One optimizer step; the loss, averaged over the data parallel ranks."""
        loss = self.model(tokens, self._positions, self._hidden, labels=targets).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        shown = loss.detach().clone()
        if self.data_size > 1:
            for tensor in [shown, *(parameter.grad for parameter in self.model.parameters())]:
                dist.all_reduce(tensor, group=self.data_group)
                tensor /= self.data_size
        self.optimizer.step()
        self.schedule.step(increment=1)
        return float(shown.item())

    def sharded_state(self) -> dict[str, Any]:
        """What ``dist_checkpointing`` saves, and what it loads into."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.dist_checkpointing.optimizer import (
            get_param_id_to_sharded_param_map,
            optim_state_to_sharding_state,
        )

        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.state_dict()
        # AdamW counts the same steps for each parameter: one number for all, not a tensor with a sharding of its own.
        steps = {int(state["step"]) for state in optimizer["state"].values()}
        sharding = get_param_id_to_sharded_param_map(model, self.model.parameters())
        optim_state_to_sharding_state(optimizer, sharding, exclude_keys=("step",))
        optimizer["step"] = max(steps, default=0)
        random = {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(),
            "tracker": self._tracker.get_states(),
        }
        shape, place = (self._tensor_size,), (self._tensor_rank,)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "random": ShardedObject("random", random, shape, place, replica_id=self.data_rank),
        }

    def load(self, path: str) -> int:
        """Takes over the state of a checkpoint, with Megatron's own loader; returns its step."""
        from megatron.core import dist_checkpointing

        # An AdamW that has not stepped yet has no moments to load into.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        loaded = dist_checkpointing.load(self.sharded_state(), path)
        self.model.load_state_dict(loaded["model"])
        optimizer = loaded["optimizer"]
        for state in optimizer["state"].values():
            state["step"] = torch.tensor(float(optimizer["step"]))
        del optimizer["step"]
        self.optimizer.load_state_dict(optimizer)
        self.schedule.load_state_dict(loaded["schedule"])
        torch.set_rng_state(loaded["random"]["cpu"])
        torch.cuda.set_rng_state(loaded["random"]["cuda"])
        self._tracker.set_states(loaded["random"]["tracker"])
        return int(loaded["iteration"])
