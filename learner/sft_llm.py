# docs: docs/learners/sft_llm.md
"""Supervised training on demonstrations, masked to the tokens that a policy would sample.

python learner/sft_llm.py --out policy                                # the tiny policy, from nothing
python learner/sft_llm.py --model NAME_OR_FOLDER --expert-share 1     # any causal LM, on the environment's expert
python learner/sft_llm.py --model NAME_OR_FOLDER --data rows.jsonl    # rows with `tokens` and `action_mask`
"""

import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedTokenizerFast,
)

import agent_r1  # noqa: F401  (registers the environments)

sys.path.insert(0, str(Path(__file__).resolve().parent))  # llm_utils lies beside this file
from llm_utils import run_files
from llm_utils.models import model_source
from agent_r1.naive_rag import naive_rag


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of demonstrations, initial weights and batches"""
    env_id: str = "AgentR1/MultihopWorld-v0"
    """the environment whose demonstrations are learned; it needs a `demonstration` method unless --data is given"""
    env_kwargs: str = "{}"
    """further arguments of the environment, as JSON"""
    split: str = "train"
    """the split that demonstrations come from"""
    data: str = ""
    """a JSONL file of rows with `tokens` and `action_mask` (as the learners log them) instead of demonstrations"""
    out: str = ""
    """folder for the trained model and tokenizer (default: runs/{run_name}/model)"""

    model: str = "scratch"
    """a Hugging Face name, a folder, "tiny" (the policy shipped for the environment), or "scratch": a small Granite
    with a tokenizer made for the environment"""
    hidden_size: int = 128
    """width of a model from scratch"""
    num_layers: int = 3
    """layers of a model from scratch"""
    intermediate_size: int = 256
    """width of the MLP of a model from scratch"""

    expert_share: float = 0.38
    """share of expert demonstrations; the rest is sloppy (what reinforcement learning is to mend)"""
    rag_share: float = 0.0
    """share of one-turn demonstrations in the naive RAG prompt, so that the policy has seen that baseline's prompt"""
    num_demonstrations: int = 80_000
    """demonstrations that are made before training"""
    tokenizer_demonstrations: int = 3_000
    """demonstrations that the vocabulary of a tokenizer from scratch is read off"""
    num_steps: int = 2_500
    """optimizer steps"""
    batch_size: int = 64
    """demonstrations a step"""
    learning_rate: float = 3e-3
    """peak learning rate of AdamW (cosine decay to a hundredth, linear warm-up)"""
    warmup_steps: int = 100
    """steps of linear warm-up"""
    weight_decay: float = 0.01
    """weight decay of AdamW"""
    max_grad_norm: float = 1.0
    """gradient norm that steps are clipped to"""
    eval_demonstrations: int = 512
    """held-out expert demonstrations that the expert-token loss is measured on"""
    eval_every: int = 500
    """steps between two measurements"""
    num_workers: int = 2
    """processes that make demonstrations (0: this one)"""
    num_threads: int = 0
    """torch threads (0: as torch decides)"""


Row = tuple[np.ndarray, np.ndarray]  # tokens int32 (T,), action mask bool (T,)


def make_env(args: Args, tokenizer) -> gym.Env:
    return gym.make(args.env_id, tokenizer=tokenizer, split=args.split, **json.loads(args.env_kwargs)).unwrapped


def demonstrate(env, index: int, turns: Callable[[], list[str]]) -> Row:
    """Play one demonstration through the environment, so that a row is what a policy would have met, to the token."""
    state, _ = env.reset(seed=0, options={"task_index": index})
    mask = np.zeros(len(state), bool)
    for text in turns():
        span = env.tokenizer.encode(text + env.dialect.end_of_turn, add_special_tokens=False)
        start = len(state)
        state, _, terminated, truncated, _ = env.step(span)
        mask = np.concatenate([mask, np.ones(len(span), bool), np.zeros(len(state) - start - len(span), bool)])
        if terminated or truncated:
            break
    return state, mask


def _demonstrate_many(job: tuple[Args, str | None, range, float, float]) -> list[Row]:
    args, tokenizer_folder, indexes, expert_share, rag_share = job
    env = make_env(args, tokenizer_folder)
    rag_env = None
    if rag_share:
        rag_env = naive_rag(type(env))(tokenizer=tokenizer_folder, split=args.split, **json.loads(args.env_kwargs))
    rows = []
    for index in indexes:
        rng = np.random.default_rng([args.seed, index])
        if rag_env is not None and rng.random() < rag_share:
            rows.append(demonstrate(rag_env, index, rag_env.rag_demonstration))
        else:
            worker = None if rng.random() < expert_share else rng
            rows.append(demonstrate(env, index, partial(env.demonstration, worker)))
    return rows


def make_demonstrations(
    args: Args, tokenizer_folder: str | None, first: int, count: int, expert_share: float, rag_share: float = 0.0
) -> list[Row]:
    """`count` demonstrations from task `first` on, made by `num_workers` processes; same rows for any number."""
    jobs = [
        (args, tokenizer_folder, range(i, min(i + 500, first + count)), expert_share, rag_share)
        for i in range(first, first + count, 500)
    ]
    if not args.num_workers:
        return list(itertools.chain.from_iterable(map(_demonstrate_many, jobs)))
    with multiprocessing.get_context("spawn").Pool(args.num_workers) as pool:
        chunks = tqdm(pool.imap(_demonstrate_many, jobs), total=len(jobs), desc="demonstrations", unit="x500")
        return list(itertools.chain.from_iterable(chunks))


def make_tokenizer(args: Args) -> PreTrainedTokenizerFast:
    """A tokenizer that keeps the environment's words and its recurring phrases whole, and spells the rest in bytes.

    Text is cut at words of the environment's `vocabulary` (and into digits, if it has those); what stands between them
    recurs in every episode and becomes one token each. Nothing is merged (`ignore_merges`): a piece is in the
    vocabulary, or it is spelled.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    from agent_r1.tokenizers import added_tokens, load_tokenizer

    byte_tokenizer = load_tokenizer(None)
    words = sorted(make_env(args, None).vocabulary(), key=lambda word: (-len(word), word))
    lower = "|".join(re.escape(word) for word in words if not re.fullmatch("[A-Z][a-z]+|[0-9]", word))
    # A lower-case word takes the space after it, so that a word and the name that follows it are neighbours.
    patterns = ["[A-Z][a-z]+", *([rf"\b(?:{lower})\b ?"] if lower else []), *(["[0-9]"] if "0" in words else [])]
    split = pre_tokenizers.Split(Regex("|".join(patterns)), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    pieces = Counter()
    specials = re.compile("|".join(map(re.escape, added_tokens(byte_tokenizer))))
    for state, mask in make_demonstrations(args, None, 0, args.tokenizer_demonstrations, 0.5, args.rag_share):
        for part in np.split(state, np.flatnonzero(np.diff(mask)) + 1):  # a policy's text is encoded by itself
            for text in specials.split(byte_tokenizer.decode(part.tolist())):
                pieces.update(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    pieces.update({piece: 10 for word in words for piece, _ in pre_tokenizer.pre_tokenize_str(word)})
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary += [p for p, n in sorted(pieces.items(), key=lambda x: (-x[1], x[0])) if n >= 10 and len(p) > 1]
    bpe = models.BPE({piece: i for i, piece in enumerate(vocabulary)}, [], ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in added_tokens(byte_tokenizer)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = byte_tokenizer.chat_template
    fast.model_max_length = 32_768
    return fast


@torch.no_grad()
def initialize(model: GraniteForCausalLM, scale: float = 0.2) -> None:
    """Start attention close to what copying needs; with usual weights a small model takes far more steps to learn it.

    Queries equal keys and outputs invert values, so that tokens attend to equal tokens and copy them (mimetic
    initialization, arXiv 2305.09828). The first heads of the first two layers make an induction head (arXiv
    2209.11895): one looks at the previous token, the next finds where the present token came before and reads on.
    """
    width, size = model.config.hidden_size, model.config.hidden_size // model.config.num_attention_heads
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.v_proj):
            torch.nn.init.orthogonal_(projection.weight)
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        attention.o_proj.weight.copy_(scale * attention.v_proj.weight.T)
    previous, induction = (layer.self_attn for layer in model.model.layers[:2])
    previous.q_proj.weight[:size], previous.k_proj.weight[:size] = 0, 0
    for i, strength in enumerate((6.0, 5.0, 4.0)):  # biases that agree where the distance is one token
        angle = model.model.rotary_emb.inv_freq[i]
        previous.k_proj.bias[i] = strength
        previous.q_proj.bias[i] = strength * torch.cos(angle)
        previous.q_proj.bias[i + size // 2] = -strength * torch.sin(angle)
    written = torch.nn.init.orthogonal_(torch.empty(width, size))
    previous.o_proj.weight[:, :size] = scale * written
    induction.q_proj.weight[:size] = 2 * previous.v_proj.weight[:size]
    induction.k_proj.weight[:size] = 2 * written.T


def read_rows(path: str, vocab_size: int) -> list[Row]:
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                tokens = np.asarray(row["tokens"], np.int32)
                mask = np.asarray(row["action_mask"], bool)
                assert tokens.ndim == 1 and tokens.shape == mask.shape and tokens.min() >= 0
                assert tokens.max() < vocab_size, "a token is outside the vocabulary"
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                message = f"{path}, line {number}: needs `tokens` and `action_mask`, alike in length: {error!r}"
                raise SystemExit(message) from None
            rows.append((tokens, mask))
    return rows


def batches(rows: list[Row], batch_size: int, rng: np.random.Generator) -> Iterator[list[Row]]:
    """Endless shuffled batches; rows of similar length go together, so that little is padded."""
    while True:
        order = rng.permutation(len(rows))
        for block in np.array_split(order, max(1, len(rows) // (batch_size * 16))):
            block = block[np.argsort([len(rows[i][0]) for i in block], kind="stable")]
            groups = [block[i : i + batch_size] for i in range(0, len(block), batch_size)]
            for group in rng.permutation(len(groups)):
                yield [rows[i] for i in groups[group]]


def action_logprobs(model, rows: list[Row], device) -> torch.Tensor:
    """Log-probs of the rows' action tokens, concatenated in order. Logits are computed at their positions only."""
    length = max(len(tokens) for tokens, _ in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    attention = torch.zeros(len(rows), length, dtype=torch.long)
    for i, (tokens, action) in enumerate(rows):
        ids[i, : len(tokens)] = torch.from_numpy(tokens).long()
        mask[i, : len(tokens)] = torch.from_numpy(action)
        attention[i, : len(tokens)] = 1
    ids, mask, attention = ids.to(device), mask.to(device), attention.to(device)
    hidden = model.get_decoder()(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, :-1][mask[:, 1:]]).float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:][mask[:, 1:]][:, None])[:, 0]


@torch.no_grad()
def token_loss(model, rows: list[Row], device) -> float:
    """Mean loss per action token, over all rows."""
    return -torch.cat([action_logprobs(model, rows[i : i + 64], device) for i in range(0, len(rows), 64)]).mean().item()


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    run_name = f"{args.env_id.replace('/', '_')}__{args.exp_name}__{args.seed}__{int(time.time())}"
    out = Path(args.out or f"runs/{run_name}/model")
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    writer = SummaryWriter(f"runs/{run_name}")
    table = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")

    # model and tokenizer
    out.mkdir(parents=True, exist_ok=True)
    if args.model == "scratch":
        tokenizer = make_tokenizer(args)
        # Granite is a plain Llama with biases; AutoTokenizer leaves the tokenizer of such a folder as it is (in a Qwen2
        # or Llama folder it would put the family's own in its place).
        config = GraniteConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.hidden_size,
            intermediate_size=args.intermediate_size,
            num_hidden_layers=args.num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            attention_bias=True,
            attention_multiplier=(args.hidden_size // 4) ** -0.5,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = GraniteForCausalLM(config)
        initialize(model)
        model.to(device)
    else:
        source = model_source(args.model, args.env_id)
        tokenizer = AutoTokenizer.from_pretrained(source)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
    tokenizer.save_pretrained(out)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {len(tokenizer)} tokens")

    # demonstrations; held-out ones come from tasks after the training ones
    heldout: list[Row] = []
    if args.data:
        rows = read_rows(args.data, len(tokenizer))
    else:
        rows = make_demonstrations(args, str(out), 0, args.num_demonstrations, args.expert_share, args.rag_share)
        heldout = make_demonstrations(args, str(out), args.num_demonstrations, args.eval_demonstrations, 1.0)
    lengths = [len(tokens) for tokens, _ in rows]
    actions = [int(mask.sum()) for _, mask in rows]
    print(f"{len(rows)} rows, {np.mean(lengths):.0f} tokens each, {np.mean(actions):.0f} of them actions")

    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.98),
    )
    stream = batches(rows, args.batch_size, np.random.default_rng(args.seed))
    progress = tqdm(range(1, args.num_steps + 1), desc="sft", unit="step")
    start = time.time()
    try:
        for step in progress:
            fraction = max(0.0, (step - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps))
            decay = 0.505 + 0.495 * math.cos(math.pi * fraction)
            rate = args.learning_rate * min(1.0, step / args.warmup_steps) * decay
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = -action_logprobs(model, next(stream), device).mean()
            if not torch.isfinite(loss):
                raise SystemExit(f"the loss is {loss.item()} at step {step}; lower --learning-rate")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            if step % 20 == 0:
                progress.set_postfix(loss=f"{loss.item():.3f}", lr=f"{rate:.1e}")
                writer.add_scalar("losses/sft_loss", loss.item(), step)
                writer.add_scalar("losses/grad_norm", norm.item(), step)
                writer.add_scalar("charts/learning_rate", rate, step)
            if heldout and (step % args.eval_every == 0 or step == args.num_steps):
                expert_loss = token_loss(model, heldout, device)
                tqdm.write(f"step {step}: expert-token loss {expert_loss:.4f}, {time.time() - start:.0f} s")
                writer.add_scalar("eval/expert_token_loss", expert_loss, step)
    except KeyboardInterrupt:
        print(f"stopped at step {step}; the model as it is goes to {out}")
    model.save_pretrained(out)
    writer.close()
    summary = {"train_seconds": time.time() - start, "finished": step == args.num_steps, "args": asdict(args)}
    run_files.write_json(Path(f"runs/{run_name}/summary.json"), summary)
    print(f"saved {out}")
