"""A language model of transformers: weight decay by group, a schedule, checkpoints, perplexity and saving."""

import math
import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_scheduler

from benchmarks.support.families import tokens
from tests.integrations.peft.models import base

output = os.environ["FOREIGN_FOLDER"]
accelerator = Accelerator(gradient_accumulation_steps=2)
results = []
for resumed in (False, True):
    torch.manual_seed(0)
    model = base("mixtral").double()
    decayed, others = ([p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    loader = DataLoader(list(tokens(0, 16)), batch_size=2)
    processes = accelerator.num_processes
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=processes, num_training_steps=4 * processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    batches = loader
    if resumed:
        accelerator.load_state(f"{output}/step_1")
        batches = accelerator.skip_first_batches(loader, 2)
    for number, ids in enumerate(batches):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == 1 and not resumed:
            accelerator.save_state(f"{output}/step_1")
    model.eval()
    losses = []
    for ids in loader:
        with torch.no_grad():
            losses.append(accelerator.gather_for_metrics(model(input_ids=ids, labels=ids).loss.repeat(len(ids))))
    results.append(math.exp(torch.cat(losses).mean()))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(output, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.wait_for_everyone()
    saved = type(unwrapped).from_pretrained(output, experts_implementation="eager").double()
    results.append(float(saved(input_ids=tokens(0, 2), labels=tokens(0, 2)).loss))
    accelerator.free_memory()
