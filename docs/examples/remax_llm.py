"""ReMax (arXiv 2310.10505): a turn's baseline is what the greedy policy earns on the same task from that turn on.

Its advantages and its loop; arguments and loss are RLOO's.

PYTHONPATH=learner python docs/examples/remax_llm.py --total-episodes 2560
"""

from collections.abc import Sequence
from dataclasses import replace

import gymnasium as gym
from rloo_llm import Args, backward

import agent_r1  # noqa: F401  (registers the environments)
from llm_utils import arguments, distributed
from llm_utils.recovery import checkpoint
from llm_utils.returns import returns_to_go
from llm_utils.run import make_run, prepare, tokenizer_of
from llm_utils.sampling.rollout import draw_episodes, rollout
from llm_utils.setup.environments import env_kwargs, environment_spec, plain_errors
from llm_utils.trajectory import Trajectory


def compute_advantages(rows: Sequence[Trajectory], greedy: Sequence[Trajectory], gamma: float) -> None:
    """Fill `advantages`. The greedy episode has nothing to do with the sampled one, so the baseline is unbiased."""
    for row, baseline in zip(rows, greedy, strict=True):
        own, other = returns_to_go([row.turn_rewards(), baseline.turn_rewards()], gamma)
        row.set_turn_advantages((own - other)[: len(row.turns)])


LEFT_OUT = ("max_staleness", "kl_coef", "reject_ratio", "loss_mask", "advantage_mask", "credit", "group_size",
            "horizon_schedule", "replay_successes", "drop_void_turns")  # fmt: skip


def check(args: Args) -> None:
    """Refuse what this example leaves out of RLOO's arguments, before any work."""
    arguments.check(args)
    given = [arguments.flag(name) for name in LEFT_OUT if getattr(args, name) != getattr(Args(), name)]
    if given:
        raise SystemExit(f"ReMax here takes no {', '.join(given)}: its default stays")


if __name__ == "__main__":
    args = prepare(arguments.read(Args, replace(Args(), exp_name="remax_llm")), check)
    envs = eval_envs = None
    if distributed.rank() == 0:
        kwargs = {"num_envs": args.num_envs, "tokenizer": tokenizer_of(args), **env_kwargs(args), "observation": "new"}
        spec = environment_spec(args.env_id)
        with plain_errors(args.env_id):
            envs = gym.make_vec(spec, split=args.split, **kwargs)
            eval_envs = gym.make_vec(spec, split=args.eval_split, **kwargs) if args.eval_episodes else None
    run = make_run(args, envs, eval_envs)
    count = args.episodes_per_iteration

    def episodes(iteration: int) -> list[tuple[int, int]]:
        return draw_episodes(args.seed, iteration, count, run.tasks, first=(iteration - 1) * 2 * count)

    with checkpoint.saving_at_exit(run.saver, run.state):
        run.start()
        for iteration in range(run.state["iteration"] + 1, run.num_iterations + 1):
            run.begin_iteration(iteration)
            rows = run.collect(iteration, episodes)
            tasks = [(row.episode + count, row.task_index) for row in rows]  # episodes of their own
            greedy = rollout(run.envs, run.eval_engine, tasks, args.seed, args.deterministic) if rows else []
            run.valid(greedy, sampled=False)  # they count for the axes and for --max-invalid, too
            rows = [row for row, other in zip(rows, greedy, strict=True) if not other.fault]
            greedy = [other for other in greedy if not other.fault]
            run.mark("rollout")
            compute_advantages(rows, greedy, args.gamma)
            if args.old_logprobs == "trainer":
                run.score_policy(rows)
            run.mark("score")
            run.saver.begin_update()
            for part in run.minibatches(rows, iteration):
                metrics = backward(part, args, run)
                metrics["grad_norm"] = run.optimizer.step(args.max_grad_norm, part)[0]
                run.metrics.append(metrics)
            run.mark("train")
            run.end_iteration(iteration, rows, {})
        run.close()
