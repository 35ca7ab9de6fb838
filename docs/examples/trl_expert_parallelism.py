"""SFT of a mixture of experts with expert parallelism, in the form of TRL's `examples/scripts`.

Without a model and a dataset it takes a small Qwen3-MoE of random weights and sums of digits, and downloads nothing:

ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/ddp_cpu.yaml \
    docs/examples/trl_expert_parallelism.py --output_dir sums --use_cpu --bf16 False --max_steps 20

accelerate launch --num_processes 8 docs/examples/trl_expert_parallelism.py \
    --model_name_or_path Qwen/Qwen3-30B-A3B \
    --dtype bfloat16 \
    --dataset_name trl-lib/Capybara \
    --packing \
    --gradient_checkpointing \
    --use_peft \
    --lora_dropout 0 \
    --lora_target_parameters mlp.experts.gate_up_proj mlp.experts.down_proj \
    --planner swap \
    --output_dir Qwen3-30B-A3B-Capybara
"""

from dataclasses import dataclass, field

from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, set_seed
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from toolkit.experts import ReplanOptions
from toolkit.integrations.transformers import expert_trainer, experts_in_files


@dataclass
class ExpertArguments:
    """Arguments of expert parallelism."""

    ep_size: int | None = field(
        default=None, metadata={"help": "Processes that share the experts; default: as many as can."}
    )
    planner: str | None = field(
        default=None, metadata={"help": "Moves experts between processes: swap, lpt, replicate; default: they stay."}
    )
    replan_every: int = field(default=200, metadata={"help": "Steps between plans."})
    balance_weight: float = field(
        default=0.001, metadata={"help": "Of the balance loss, which is taken over the tokens of all processes."}
    )


def load_model(model_args, training_args):
    if model_args.model_name_or_path is not None:
        # Each process reads its own experts from the files when training begins, so none holds the whole model.
        with experts_in_files():
            return AutoModelForCausalLM.from_pretrained(
                model_args.model_name_or_path,
                revision=model_args.model_revision,
                attn_implementation=model_args.attn_implementation,
                dtype=model_args.dtype,
            )
    set_seed(training_args.seed)  # the same random weights on every process
    return AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
        )
    )


def load_tokenizer(model_args):
    if model_args.model_name_or_path is not None:
        return AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="Ā", eos_token="ā")


def load_texts(script_args):
    if script_args.dataset_name is not None:
        return load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    sums = [(a, b) for a in range(10) for b in range(10)]
    texts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in sums], "completion": [str(a + b) for a, b in sums]})
    return {script_args.dataset_train_split: texts, script_args.dataset_test_split: texts}


def main(script_args, training_args, model_args, expert_args):
    # One balance loss: the model's own sees the tokens of one process, and pools the layers.
    training_args.router_aux_loss_coef = 0.0
    # Checkpoints can be resumed nevertheless: the optimizer of all processes is in their folder `toolkit`.
    training_args.save_only_model = True

    dataset = load_texts(script_args)
    planner = expert_args.planner
    trainer_class = expert_trainer(
        SFTTrainer,
        ep_size=expert_args.ep_size,
        replan=ReplanOptions(planner=planner, every=expert_args.replan_every) if planner else None,
        balance_weight=expert_args.balance_weight,
    )
    trainer = trainer_class(
        model=load_model(model_args, training_args),
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        processing_class=load_tokenizer(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)  # on every process, because each gives its experts
    return trainer


def make_parser():
    return TrlParser((ScriptArguments, SFTConfig, ModelConfig, ExpertArguments))


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
