"""Expert parallelism, one feature in the form of Accelerate's `examples/by_feature`.

accelerate launch --num_processes 4 docs/examples/accelerate_expert_parallelism.py
ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/ddp_cpu.yaml \
    docs/examples/accelerate_expert_parallelism.py --cpu
"""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, Qwen3MoeConfig, get_linear_schedule_with_warmup, set_seed

# New Code #
from toolkit import ExpertParallel
from toolkit.experts import ReplanOptions

########################################################################
# This example shards the experts of an MoE model over the processes.
# Tokens are dispatched to the process of their experts, and experts are
# rebalanced during training.
#
# It trains a small Qwen3-MoE to classify synthetic texts, without a
# download, on one or several CPUs or GPUs. The losses are the same on any
# number of processes for one global batch size.
#
# Lines that are not in Accelerate's other examples follow "New Code".
########################################################################

VOCABULARY, LABELS, PAD = 96, 3, 0


def get_dataloaders(batch_size: int = 16):
    """
    Creates `DataLoader`s of texts of 6 to 16 tokens. Two of three tokens are from the third of the vocabulary that
    belongs to the label.

    Args:
        batch_size (`int`, *optional*):
            Samples per step, over all processes.
    """
    draws = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, size: int = 1):
        return torch.randint(low, high, (size,), generator=draws)

    def make_texts(number: int):
        texts, words = [], (VOCABULARY - 1) // LABELS
        for label in draw(0, LABELS, number).tolist():
            length = draw(6, 17).item()
            own = 1 + words * label + draw(0, words, length)
            texts.append({"ids": torch.where(draw(0, 3, length) > 0, own, draw(1, VOCABULARY, length)), "label": label})
        return texts

    def collate_fn(examples):
        ids = torch.nn.utils.rnn.pad_sequence([example["ids"] for example in examples], True, PAD)
        labels = torch.tensor([example["label"] for example in examples])
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}

    # The seed is fixed: every process has the same texts.
    train_dataloader = DataLoader(make_texts(256), shuffle=True, collate_fn=collate_fn, batch_size=batch_size)
    eval_dataloader = DataLoader(make_texts(120), shuffle=False, collate_fn=collate_fn, batch_size=32)
    return train_dataloader, eval_dataloader


def training_function(config, args):
    # With both settings the steps are the same on any number of processes: batch_size is global, and the order depends
    # on the seed only.
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
    )
    lr, num_epochs, seed = config["lr"], int(config["num_epochs"]), int(config["seed"])
    # New Code #
    # Each process builds the whole model and then keeps its own experts. If it does not fit, see `experts_in_files` of
    # toolkit.integrations.transformers.
    set_seed(seed)
    model = AutoModelForSequenceClassification.from_config(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            num_labels=LABELS,
            pad_token_id=PAD,
        )
    )
    train_dataloader, eval_dataloader = get_dataloaders(int(config["batch_size"]))
    optimizer = AdamW(params=model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=4, num_training_steps=len(train_dataloader) * num_epochs
    )
    # New Code #
    # `experts.prepare` replaces `accelerator.prepare`, and takes the same objects in any order.
    replan = ReplanOptions(planner="swap", every=args.replan_every)
    experts = ExpertParallel(accelerator, ep_size=args.ep_size, replan=replan)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = experts.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        total_loss = torch.zeros((), device=accelerator.device)
        for batch in train_dataloader:
            loss = model(**batch).loss
            total_loss += loss.detach()
            accelerator.backward(loss)
            # torch.nn.utils.clip_grad_norm_ would clip by the norm of this process's experts.
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = []
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            correct.append(accelerator.gather_for_metrics(predictions == batch["labels"]))
        loss = accelerator.reduce(total_loss, "mean").item() / len(train_dataloader)
        # Use accelerator.print to print only on the main process.
        accelerator.print(f"epoch {epoch}:", {"loss": loss, "accuracy": torch.cat(correct).float().mean().item()})

    # New Code #
    # A collective. It writes the full model.
    if args.output_dir is not None:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training an MoE model.")
    parser.add_argument(
        "--mixed_precision",
        type=str,
        default=None,
        choices=["no", "bf16"],
        help="Whether to use mixed precision. fp16 is not supported with sharded experts.",
    )
    # New Code #
    parser.add_argument(
        "--ep_size",
        type=int,
        default=None,
        help="Processes that share the experts. Default: as many as possible.",
    )
    # New Code #
    parser.add_argument("--replan_every", type=int, default=200, help="Steps between plans of the placement.")
    parser.add_argument("--output_dir", type=str, default=None, help="Where to save the trained model.")
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    args = parser.parse_args()
    config = {"lr": 3e-3, "num_epochs": 3, "seed": 42, "batch_size": 16}
    training_function(config, args)


if __name__ == "__main__":
    main()
