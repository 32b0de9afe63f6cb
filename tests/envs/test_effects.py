"""A call that may have had an effect is never made again because of a fault; one that surely had none is."""

import asyncio
import time
from urllib.error import URLError

import numpy as np
import pytest

from agent_r1 import Task, Tool, ToolEnv, ToolFault, ToolResult, faults
from agent_r1.vector import ToolVectorEnv
from agent_r1_tools import run_batch

SCHEMA = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(faults, "FIRST_PAUSE", 0.01)


class Shop(ToolEnv):
    """Its `order` does its work, and then breaks so many times."""

    num_tasks = 1

    def __init__(self, tools, **kwargs):
        super().__init__(tools, **{"fault_deadline": 5.0, **kwargs})

    def make_task(self, index):
        return Task("t", "Order tea.", ["tea"])

    def judge_answer(self, answer):
        return 1.0, {}


class Orders:
    """Notes what was ordered, and raises `error` after it, `times` times."""

    def __init__(self, error, times=2):
        self.made, self.error, self.times = [], error, times

    def order(self, what: str) -> str:
        """Order something."""
        self.made.append(what)
        if what == "tea" and self.made.count("tea") <= self.times:
            raise self.error
        return "done"


class OrderTool(Tool):
    """The same as a class of one's own."""

    name, description, parameters = "order", "Order something.", SCHEMA

    def __init__(self, orders):
        self.orders = orders

    def execute(self, arguments):
        return ToolResult(self.orders.order(**arguments))


class SessionTool(OrderTool):
    concurrency_safe = False


class StateTool(SessionTool):
    """A session that goes back: what it did before the fault is undone."""

    def get_state(self):
        return list(self.orders.made)

    def set_state(self, state):
        self.orders.undone = getattr(self.orders, "undone", 0) + 1


def plain(orders, **kwargs):
    def order(what: str) -> str:
        """Order something."""
        return orders.order(what)

    return Tool.from_function(order, **kwargs)


def async_tool(orders, **kwargs):
    async def order(what: str) -> str:
        """Order something."""
        await asyncio.sleep(0)
        return orders.order(what)

    return Tool.from_function(order, **kwargs)


def play(tool, *whats, vector=False, **kwargs):
    """The info of a turn with these calls, in an environment alone or in one of many."""

    def make(**more):
        return Shop([tool], **kwargs, **more)

    env = make()
    text = "\n".join(env.dialect.tool_call("order", {"what": what}) for what in whats) + env.dialect.end_of_turn
    span = np.array(env.tokenizer.encode(text, add_special_tokens=False), np.int32)
    if not vector:
        env.reset(seed=0)
        return env.step(span)[-1]
    envs = ToolVectorEnv(make, 1)
    envs.reset(seed=0)
    envs.send([span])
    info = envs.recv()[-1][0]
    envs.close()
    return info


LEFT_OPEN = [
    ConnectionError("lost"), ConnectionResetError(104, "reset"), ConnectionAbortedError("aborted"),
    BrokenPipeError("pipe"), TimeoutError("no answer"), OSError("in words"), OSError(5, "EIO"),
    URLError(TimeoutError("late")), ToolFault("it may have been ordered", ran=True),
    ConnectionRefusedError(111, "refused"),  # perhaps a second connection of the call, after it has ordered
    URLError(ConnectionRefusedError(111, "refused")),
]  # fmt: skip
NOT_RUN = [ToolFault("try again"), ToolFault("it was never sent", ran=False)]


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("make", [plain, async_tool, lambda orders: Tool.from_function(orders.order)])
@pytest.mark.parametrize("error", LEFT_OPEN, ids=repr)
def test_a_function_is_called_once_where_nobody_knows_what_it_did(error, make, vector):
    orders = Orders(error)
    info = play(make(orders), "tea", vector=vector)
    assert orders.made == ["tea"] and info["truncation_reason"] == "fault" and info["reward_terms"] == {}
    assert info["fault"].startswith("tool order: ") and info["fault"].endswith(faults.MADE_ONCE)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("make", [plain, async_tool, lambda orders: Tool.from_function(orders.order)])
@pytest.mark.parametrize("error", NOT_RUN, ids=repr)
def test_a_function_is_called_again_where_it_says_that_it_may_be(error, make, vector):
    orders = Orders(error)
    info = play(make(orders), "tea", vector=vector)
    assert len(orders.made) == 3 and "fault" not in info and info["tool_calls"][0]["ok"]


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("error", [*LEFT_OPEN, *NOT_RUN], ids=repr)
@pytest.mark.parametrize("make", [plain, async_tool])
def test_a_repeatable_function_is_called_again(make, error, vector):
    orders = Orders(error)
    info = play(make(orders, repeatable=True), "tea", vector=vector)
    assert len(orders.made) == 3 and "fault" not in info


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize(
    ("kind", "repeatable", "made"),
    [
        (OrderTool, None, 3),  # a class says of its calls that they don't influence each other
        (OrderTool, False, 1),
        (SessionTool, None, 1),  # they do, and nothing says how to go back
        (SessionTool, True, 3),
        (StateTool, None, 3),
        (StateTool, False, 1),
    ],
)
def test_a_class_says_by_its_attributes_whether_its_calls_may_be_made_again(kind, repeatable, made, vector):
    orders = Orders(ConnectionError("lost"))
    tool = kind(orders)
    tool.repeatable = repeatable
    info = play(tool, "tea", vector=vector)
    assert len(orders.made) == made and ("fault" in info) == (made == 1)
    assert getattr(orders, "undone", 0) >= (made - 1) * (kind is StateTool)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("calls", [("milk", "tea"), ("tea", "milk"), ("milk", "bread", "tea", "jam")])
def test_calls_before_the_one_that_faulted_are_not_made_again(calls, vector):
    for error, times in ((ConnectionError("lost"), 1), (ToolFault("try again"), 3)):
        orders = Orders(error)
        info = play(Tool.from_function(orders.order), *calls, vector=vector)  # a method: one after the other
        assert [orders.made.count(what) for what in calls if what != "tea"].count(1) >= calls.index("tea")
        assert max(orders.made.count(what) for what in calls if what != "tea") <= 1
        assert orders.made.count("tea") == times and ("fault" in info) == (times == 1)


@pytest.mark.parametrize("vector", [False, True])
def test_a_call_that_hangs_is_not_made_again(vector):
    made = []

    def order(what: str) -> str:
        """Order something."""
        made.append(what)
        time.sleep(0.3)
        return "done"

    tool = Tool.from_function(order, timeout=0.05, timeout_is_fault=True)
    assert play(tool, "tea", vector=vector)["truncation_reason"] == "fault" and made == ["tea"]


def test_a_batch_that_breaks_is_not_made_again_call_by_call():
    class Many(OrderTool):
        repeatable = False

        def batch_execute(self, batch):
            self.orders.made += [arguments["what"] for arguments in batch]
            raise ConnectionError("lost")

    orders = Orders(None)
    results = run_batch(Many(orders), [{"what": "tea"}, {"what": "milk"}])
    assert orders.made == ["tea", "milk"] and all(result.fault and result.ran for result in results)


@pytest.mark.parametrize("vector", [False, True])
def test_no_deadline_still_means_no_second_attempt(vector):
    for error in (ToolFault("never sent", ran=False), ConnectionError("lost")):
        orders = Orders(error)
        info = play(Tool.from_function(orders.order), "tea", vector=vector, fault_deadline=0)
        assert orders.made == ["tea"] and info["fault"] == f"tool order: {type(error).__name__}: {error}"


@pytest.mark.parametrize("vector", [False, True])
def test_a_fault_says_that_its_call_was_made_once_only_where_that_is_why(vector):
    for error, repeatable, said in (
        (ConnectionError("x" * 1000), False, True),
        (ConnectionError("lost"), True, False),
        (ToolFault("down"), False, False),
    ):
        info = play(plain(Orders(error, 100), repeatable=repeatable), "tea", vector=vector, fault_deadline=0.05)
        assert info["fault"].endswith(faults.MADE_ONCE) == said and len(info["fault"]) <= 300


def test_a_refused_connection_of_a_class_with_effects_and_of_a_batch_may_have_had_one():
    class Many(OrderTool):
        repeatable = False

        def batch_execute(self, batch):
            self.orders.made += [arguments["what"] for arguments in batch]
            raise ConnectionRefusedError(111, "refused")

    orders = Orders(None)
    results = run_batch(Many(orders), [{"what": "tea"}, {"what": "milk"}])
    assert orders.made == ["tea", "milk"] and all(result.fault and result.ran for result in results)


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("hook", ["judge_result", "judge_answer", "start_episode"])
def test_a_hook_that_made_such_a_call_is_not_asked_again(hook, vector, monkeypatch):
    asked = []

    def raises(self, *arguments):
        asked.append(hook)
        raise ToolFault("it may have been ordered", ran=True)

    monkeypatch.setattr(Shop, hook, raises)
    tool = plain(Orders(None, 0))
    if hook == "start_episode" and not vector:
        with pytest.raises(ToolFault, match="may have been ordered"):
            Shop([tool]).reset(seed=0)
    elif hook == "judge_answer":
        env = Shop([tool])
        span = np.array(env.tokenizer.encode("<answer>tea</answer>" + env.dialect.end_of_turn), np.int32)
        env.reset(seed=0)
        assert "may have been ordered" in env.step(span)[-1]["fault"]
    else:
        assert "may have been ordered" in play(tool, "tea", vector=vector)["fault"]
    assert asked == [hook]
