"""SQLite for a policy: what schema and query show, and what a query can't do, whatever it is."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from agent_r1_tools import ToolFault, run_tool, sql
from agent_r1_tools.sql import Database, QueryTool, SchemaTool, same_result

SCRIPT = (
    "CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, height REAL);\n"
    "CREATE TABLE pets (id INTEGER PRIMARY KEY, owner INTEGER REFERENCES people(id), name TEXT);\n"
    + "".join(f"INSERT INTO people VALUES ({i}, 'p{i:03}', {i / 10});\n" for i in range(1, 201))
    + "".join(f"INSERT INTO pets VALUES ({i}, {i % 7 + 1}, 'q{i}');\n" for i in range(1, 51))
)
DATABASE = Database(script=SCRIPT)


def query(text, database=DATABASE):
    return run_tool(QueryTool(database), {"sql": text})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "people.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(SCRIPT)
    connection.close()
    return path


def test_what_schema_and_query_show(file):
    for database in (DATABASE, Database(file=str(file))):
        schema = SchemaTool(database)
        assert run_tool(schema, {}).content == (
            "people(id INTEGER PRIMARY KEY, name TEXT, height REAL)\n"
            "pets(id INTEGER PRIMARY KEY, owner INTEGER -> people.id, name TEXT)"
        )
        assert run_tool(schema, {"table": "PETS"}).data == {"tables": ["pets"]}
        missing = run_tool(schema, {"table": "cars"})
        assert missing.content == "There is no table 'cars'. Tables: people, pets." and not missing.ok
        assert query("SELECT name, height FROM people WHERE id < 3", database).content == (
            "name | height\np001 | 0.1\np002 | 0.2\n(2 rows)"
        )
        assert query("SELECT NULL, x'00ff', 'a\nb'", database).content.splitlines()[1] == "NULL | x'00ff' | a b"
        many = query("SELECT * FROM people", database)
        assert many.content.endswith("(more than 30 rows)") and len(many.data["rows"]) == 30


def test_schema_shows_as_many_tables_as_there_are():
    many = Database(script="".join(f"CREATE TABLE t{i} (a, b, c);\n" for i in range(2_000)))
    while sql._idle:  # a new process has no steps left over from a query
        sql.child_process.end(sql._idle.pop())
    assert len(run_tool(SchemaTool(many), {}).data["tables"]) == 2_000


@pytest.mark.parametrize("text", ["", ";", "-- nothing", "SELECT", "SELECT nothing FROM people", "SELECT 1; SELECT 2"])
def test_what_is_no_query_is_told_so(text):
    result = query(text)
    assert not result.ok and result.content.startswith("Error: ") and result.fault is None


def test_arguments_of_any_kind_get_an_answer():
    for text in ("\ud800", "SELECT '\ud800'", "SELECT 1\0", "x" * 100_000, "'" * 9_999, "日本", "SELECT '</answer>'"):
        result = query(text)
        assert result.fault is None and len(result.content) < 9_000
    for arguments in ({}, {"sql": 3}, {"sql": None}, {"query": "SELECT 1"}, {"sql": "SELECT 1", "more": 1}):
        assert run_tool(QueryTool(DATABASE), arguments).data == {"error": "bad_arguments"}


# What none of these may do: write, reach another file, take long, take memory, be different every time.
ATTACKS = {
    "insert": "INSERT INTO people VALUES (999, 'x', 1)",
    "update by a common table expression": "WITH x AS (SELECT 1) UPDATE people SET name = 'x'",
    "delete and return": "DELETE FROM people RETURNING *",
    "drop": "DROP TABLE people",
    "a temporary table": "CREATE TEMP TABLE t AS SELECT 1",
    "a view": "CREATE VIEW v AS SELECT 1",
    "attach a file": "ATTACH DATABASE 'OUTSIDE' AS other",
    "write a copy": "VACUUM INTO 'OUTSIDE'",
    "a transaction": "BEGIN IMMEDIATE",
    "a savepoint": "SAVEPOINT s",
    "writable schema": "PRAGMA writable_schema = ON",
    "switch off query_only": "PRAGMA query_only = OFF",
    "the heap limit of the process": "PRAGMA hard_heap_limit = 1",
    "a pragma as a table": "SELECT * FROM pragma_database_list",
    "load a library": "SELECT load_extension('OUTSIDE')",
    "write by a function of the shell": "SELECT writefile('OUTSIDE', 'x')",
    "read by a function of the shell": "SELECT readfile('/etc/passwd')",
    "the tokenizer's address": "SELECT hex(fts3_tokenizer('simple'))",
    "a virtual table": "CREATE VIRTUAL TABLE t USING fts5(x)",
    "random numbers": "SELECT name FROM people ORDER BY random() LIMIT 1",
    "random bytes": "SELECT hex(randomblob(8))",
    "endless recursion": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "endless recursion that keeps rows": (
        "WITH RECURSIVE c(x, y) AS (SELECT 1, hex(zeroblob(90000)) UNION SELECT x + 1, y || x FROM c) "
        "SELECT * FROM c ORDER BY y"
    ),
    "a cartesian join": "SELECT count(*) FROM people a, people b, people c, people d",
    "a sorted cartesian join of long texts": (
        "SELECT x FROM (SELECT replace(hex(zeroblob(90000)), '0', 'abcd') || a.id AS x "
        "FROM people a, people b, people c) ORDER BY x"
    ),
    "a huge blob": "SELECT zeroblob(1000000000)",
    "a huge width": "SELECT printf('%1000000000d', 1)",
    "a huge repetition": "SELECT printf('%.*c', 1500000000, 'x') || 'x'",
    "a huge join of texts": "SELECT group_concat(hex(zeroblob(200000))) FROM people",
    "a huge JSON": "SELECT json_group_array(hex(zeroblob(200000))) FROM people",
    "a quadratic search": "SELECT instr(hex(zeroblob(490000)), hex(zeroblob(240000)) || '1')",
    "a pattern that backtracks": "SELECT hex(zeroblob(490000)) LIKE '%0_0%0_0%0_0%0_0%0_0%0_0%0_0%0_0%0_0%1_1%'",
    "deep nesting": "SELECT " + "(" * 4_000 + "1" + ")" * 4_000,
    "a long sum": "SELECT " + "+".join(["1"] * 4_000),
    "many unions": " UNION ALL ".join(["SELECT 1"] * 500),
    "many tables": "SELECT count(*) FROM " + ", ".join(f"people p{i}" for i in range(100)),
}
HARMLESS = {"a pattern that backtracks", "a huge width"}  # SQLite answers them at once


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_comes_to_nothing(name, tmp_path):
    outside = tmp_path / "outside"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = query(ATTACKS[name].replace("OUTSIDE", str(outside)))
    assert result.fault is None and result.ok == (name in HARMLESS)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # of processes that have ended
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < 5
    assert not outside.exists() and len(result.content) < 9_000
    assert query("SELECT count(*) FROM people").data["rows"] == [["200"]]


NOW = "2024-07-26 00:00:00"
READS_THE_CLOCK = [
    "date()", "date('now')", "date('no' || 'w')", "date(x'6e4f57')", "date('now' || char(0) || 'x')", "time('NOW')",
    "datetime('now', '+0 days')", "datetime('now', 'localtime')", "datetime('now', 'utc')", "julianday('now')",
    "julianday()", "unixepoch()", "strftime('%s')", "strftime('%Y-%m-%d %H:%M:%f', 'now')", "datetime('subsec')",
    "strftime('%f', 'now', 'subsec')", "current_date", "CURRENT_TIME", "current_timestamp",
]  # fmt: skip


@pytest.fixture(params=["by_symbol", "by_connection"])
def way(request, tmp_path, monkeypatch):
    """The server in another time zone, with one of the ways to the clock; "no way" where a test names it."""
    server, there = tmp_path / "server.py", str(sql.SERVER.parent)
    ways = "" if request.param == "no way" else f"sql_clock.{request.param}"
    server.write_text(
        f"import sys; sys.path.insert(0, {there!r}); import sql_clock; sql_clock.WAYS = [{ways}]\n"
        "import sql_server; sql_server.serve()"
    )
    monkeypatch.setattr(sql, "SERVER", server)
    monkeypatch.setenv("TZ", "JST-9")
    sql._end_all()
    yield
    sql._end_all()


@pytest.mark.usefixtures("way")
def test_the_clock_decides_no_result(file):
    """At any moment and in any time zone: what SQLite itself gives, of that moment in UTC."""
    fixed = f"'{NOW}'"
    there = sqlite3.connect(":memory:").execute("SELECT datetime('subsec')").fetchone()[0] is not None
    special = {
        "date()": f"date({fixed})", "julianday()": f"julianday({fixed})", "unixepoch()": f"unixepoch({fixed})",
        "strftime('%s')": f"strftime('%s', {fixed})", "datetime('subsec')": f"{fixed} || '.000'" if there else "NULL",
        "date('no' || 'w')": f"date({fixed})", "date(x'6e4f57')": f"date({fixed})", "time('NOW')": f"time({fixed})",
        "date('now' || char(0) || 'x')": f"date({fixed})", "datetime('now', 'localtime')": fixed,
        "datetime('now', 'utc')": fixed, "current_date": f"date({fixed})", "CURRENT_TIME": f"time({fixed})",
        "current_timestamp": f"datetime({fixed})",
    }  # fmt: skip
    for call in READS_THE_CLOCK:
        wanted = special.get(call, call.replace("'now'", fixed))
        for database in (DATABASE, Database(file=str(file))):
            assert query(f"SELECT {call} AS x", database).data["rows"] == query(f"SELECT {wanted} AS x").data["rows"]
        assert same_result(DATABASE, "SELECT 1", f"SELECT {call} IS {wanted}")[0]


@pytest.mark.usefixtures("way")
def test_dates_are_what_sqlite_makes_of_them():
    calls = ["date('2024-02-29', '+1 year')", "strftime('now', 'now') IS NULL", "date(NULL)", "date('x')",
             "date(2460000.5)", "strftime()", "strftime('%W|%j', '2023-05-06')", "date('2023-01-01', 'now')",
             "time('05:06')", "date(char(55296))", "date(CAST(x'ff' AS TEXT))", "strftime('é%Y', 1)"]  # fmt: skip
    script = SCRIPT + (
        "CREATE VIEW v AS SELECT strftime('%Y') AS y, strftime('%m', '2020-03-04') AS m, current_date AS d;"
        "CREATE TABLE made (at DEFAULT current_timestamp, x); INSERT INTO made (x) VALUES (CAST(x'32ff' AS TEXT));"
    )
    own = sqlite3.connect(":memory:")
    for call in calls:
        (value,) = own.execute(f"SELECT {call}").fetchone()
        assert query(f"SELECT {call} AS x").data["rows"] == [["NULL" if value is None else str(value)]]
    assert query("SELECT * FROM v", Database(script=script)).data["rows"] == [["2024", "03", "2024-07-26"]]
    assert query("SELECT at, date(x) FROM made", Database(script=script)).data["rows"] == [[NOW, "NULL"]]
    assert same_result(Database(script=script), "SELECT date(x) FROM made", "SELECT NULL FROM made") == (True, "")
    many = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 20000) "
    assert query(f"{many} SELECT count(DISTINCT date(x)) FROM c").data["rows"] == [["20000"]]
    arguments = ", ".join(["'now'"] * 64)
    assert query(f"SELECT date({arguments})").data["rows"] == [["NULL"]]


def test_many_dates_are_bounded_by_steps_only():
    """Whether a query is gold or not: its dates cost what SQLite's own functions cost."""
    dates = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 200000) SELECT"
    years = f"{dates} max(strftime('%Y', x)) FROM c"
    assert query(years).data["rows"] == [["-4713"]]  # as a text, the greatest
    assert same_result(DATABASE, years, years) == (True, "no copy")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_dates_leave_no_memory_taken():
    dates = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 2000) SELECT"
    wide = ", ".join(["printf('%0100d', x)"] * 60)
    sql._end_all()
    assert query(f"{dates} count(max({wide})) FROM c").ok
    before = address_space(sql._idle[0])
    assert query(f"{dates} count(date({wide})) FROM c").ok
    assert address_space(sql._idle[0]) - before < 2 << 20


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["no way"], indirect=True)
def test_where_the_clock_goes_no_date_is_told():
    for call in READS_THE_CLOCK:
        assert "not authorized" in query(f"SELECT {call}").content
    assert query("SELECT count(*) FROM people").data["rows"] == [["200"]]


@pytest.mark.parametrize("name", ["insert", "drop", "writable schema", "attach a file", "write a copy"])
def test_a_file_stays_as_it_is(name, file, tmp_path):
    before, there = file.read_bytes(), sorted(tmp_path.iterdir())
    file.chmod(0o666)
    assert not query(ATTACKS[name].replace("OUTSIDE", str(tmp_path / "outside")), Database(file=str(file))).ok
    assert file.read_bytes() == before and sorted(tmp_path.iterdir()) == there


def test_without_bounds_the_attacks_succeed(tmp_path):
    """Or the tests above would show nothing."""
    outside = tmp_path / "outside"
    with sqlite3.connect(":memory:", isolation_level=None) as connection:
        connection.executescript(SCRIPT)
        for name in ("insert", "attach a file", "writable schema", "random bytes", "a pragma as a table"):
            connection.execute(ATTACKS[name].replace("OUTSIDE", str(outside))).fetchall()
        connection.execute("DETACH other")
        connection.execute(ATTACKS["write a copy"].replace("OUTSIDE", str(tmp_path / "copy")))
        assert connection.execute("SELECT count(*) FROM people").fetchone() == (201,) and (tmp_path / "copy").exists()
    connection.close()


def test_a_query_that_is_stopped_is_stopped_at_the_same_place():
    def rows(last):
        numbers = f"SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT {last}"
        return query(f"WITH RECURSIVE c(x) AS ({numbers}) SELECT max(x) FROM c")

    assert rows(100_000).ok and not rows(1_000_000).ok


# --- comparing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "answer", "mode", "right"),
    [
        ("SELECT count(*) FROM people", "SELECT count(id) FROM people", "rows", True),
        ("SELECT count(*) FROM people", "SELECT 200", "rows", False),  # a constant
        ("SELECT name FROM people WHERE id = 7", "SELECT 'p007'", "rows", False),
        ("SELECT name FROM people WHERE id < 9", "SELECT name FROM people WHERE id < 9 ORDER BY id DESC", "rows", True),
        ("SELECT name FROM people ORDER BY id", "SELECT name FROM people ORDER BY id DESC", "ordered", False),
        ("SELECT name FROM people ORDER BY id", "SELECT name FROM people ORDER BY height", "ordered", True),
        ("SELECT owner FROM pets", "SELECT DISTINCT owner FROM pets", "rows", False),
        ("SELECT owner FROM pets", "SELECT DISTINCT owner FROM pets", "set", True),
        ("SELECT name, id FROM people", "SELECT id, name FROM people", "rows", True),  # as in Spider's script
        ("SELECT name, id FROM people", "SELECT id, name FROM people", "set", False),  # as in BIRD's
        ("SELECT name FROM people", "SELECT name, id FROM people", "rows", False),
        ("SELECT name FROM people", "SELECT name FROM people LIMIT 199", "rows", False),
        ("SELECT sum(height) FROM people", "SELECT sum(height / 7) * 7 FROM people", "rows", True),
        ("SELECT sum(height) FROM people", "SELECT sum(height) + 0.001 FROM people", "rows", False),
        ("SELECT count(*) FROM people", "SELECT count(*) * 1.0 FROM people", "rows", True),
        ("SELECT count(*) FROM people", "SELECT count(*) * 1.0 FROM people", "set", True),
        ("SELECT 9e15 FROM people", "SELECT 9000000000000000 FROM people", "set", True),
        ("SELECT 9e18 FROM people", "SELECT 9e18 + 1 FROM people", "rows", True),
        ("SELECT 0 FROM people", "SELECT -0.0 FROM people", "set", True),
        ("SELECT '1' FROM people", "SELECT 1 FROM people", "set", False),
        ("SELECT x'31' FROM people", "SELECT '1' FROM people", "set", False),
        ("SELECT id FROM people", "SELECT CAST(id AS TEXT) FROM people", "rows", False),
        ("SELECT NULL FROM people", "SELECT 0 FROM people", "rows", False),
        ("SELECT count(*) FROM people", "SELECT a.id FROM people a, people b, people c", "rows", False),
        ("SELECT count(*) FROM people", ATTACKS["endless recursion that keeps rows"], "rows", False),
        ("SELECT count(*) FROM people", "DELETE FROM people RETURNING 200", "rows", False),
        ("SELECT count(*) FROM people", "x" * 20_000, "rows", False),
    ],
)
def test_queries_are_compared_by_their_results(gold, answer, mode, right, file):
    for database in (DATABASE, Database(file=str(file))):
        assert same_result(database, gold, answer, mode)[0] == right


def test_rows_with_one_hash_are_compared_as_fast_as_others():
    """Python's hash of a tuple of numbers is linear in them, modulo 2**64."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(sql.SERVER.parent)!r}); import sql_server\n"
        "P1, P2, M = 11400714785074694791, 14029467366897019727, 1 << 64\n"
        "signed = lambda x: x % M - (M if x % M >> 63 else 0)\n"
        "inverse = pow(P2, -1, M)\n"
        "d, e = (1 << 33) * inverse % M, -P1 * inverse % M\n"
        "rows = [(signed(n * d), signed(n * e)) for n in range(200_000)]\n"
        "rows = [row for row in rows if max(map(abs, row)) < 1 << 61]\n"
        "assert len(rows) > 5_000 and len(set(map(hash, rows))) < len(rows) / 100\n"
        "began = time.process_time()\n"
        "assert not sql_server.equal([(1, 2)], rows, 'set') and sql_server.equal(rows, rows[::-1], 'set')\n"
        "assert time.process_time() - began < 1\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=100)


AWKWARD = {
    "as it is": "",
    "in WAL mode": "PRAGMA journal_mode = WAL;",
    "with keys that are checked": "PRAGMA foreign_keys = ON;",
    "with a trigger": "CREATE TRIGGER stay BEFORE DELETE ON people BEGIN SELECT RAISE(ABORT, 'no'); END;",
    "with an index and a view": "CREATE INDEX i ON people (height); CREATE VIEW v AS SELECT * FROM people;",
}


@pytest.mark.parametrize("name", AWKWARD)
def test_a_part_of_a_database_has_the_same_names(name, tmp_path):
    path = tmp_path / "people.sqlite"
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.executescript(f"PRAGMA synchronous = OFF; BEGIN; {SCRIPT} COMMIT; {AWKWARD[name]}")
    connection.close()
    before, there = path.read_bytes(), sorted(tmp_path.iterdir())
    gold = "SELECT count(*) FROM people WHERE height > 5"
    for database in (Database(file=str(path)), Database(script=SCRIPT + AWKWARD[name])):
        for right in ("count(rowid) FROM people", "count(*) FROM main.people", "count(oid) FROM people NOT INDEXED"):
            assert same_result(database, gold, f"SELECT {right} WHERE height > 5") == (True, "")
        for wrong in ("150", "count(*) FROM people", "iif(EXISTS (SELECT 1 FROM sqlite_temp_master), 0, 150)"):
            assert same_result(database, gold, f"SELECT {wrong}") == (False, "another result")
    assert path.read_bytes() == before and sorted(tmp_path.iterdir()) == there


@pytest.mark.parametrize(
    "script", ["CREATE VIRTUAL TABLE x USING fts5(y);", "CREATE TABLE x AS SELECT zeroblob(5000000);"]
)
def test_a_part_of_a_database_that_is_not_copied_is_made_of_views(script, tmp_path):
    path = tmp_path / "people.sqlite"
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.executescript("PRAGMA synchronous = OFF; BEGIN;" + SCRIPT + script + "COMMIT;")
    connection.close()
    gold, database = "SELECT count(*) FROM people", Database(file=str(path))
    assert same_result(database, gold, "SELECT count(id) FROM people") == (True, "")
    for wrong in ("SELECT 200", "SELECT count(*) FROM main.people"):
        assert same_result(database, gold, wrong) == (False, "another result")


def test_a_view_of_the_data_may_read_a_virtual_table():
    script = "CREATE VIRTUAL TABLE box USING rtree(id, x, y); INSERT INTO box VALUES (1, 0, 1), (2, 3, 4);"
    database = Database(script=f"{script} CREATE VIEW small AS SELECT id FROM box WHERE x < 2;")
    assert same_result(database, "SELECT id FROM small", "SELECT id FROM box WHERE x = 0")[0]


@pytest.mark.usefixtures("way")
def test_a_view_of_the_data_may_call_no_more_than_a_query(tmp_path):
    path = tmp_path / "people.sqlite"
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.executescript("CREATE VIEW lucky AS SELECT random() r; CREATE VIEW today AS SELECT date('now') d;")
    connection.close()
    database = Database(file=str(path))
    with pytest.raises(ToolFault, match="not authorized|prohibited"):
        same_result(database, "SELECT r FROM lucky", "SELECT 1")
    assert same_result(database, "SELECT '2024-07-26'", "SELECT d FROM today")[0]


def test_other_databases_are_compared_as_well():
    other = Database(script=SCRIPT + "DELETE FROM people WHERE id > 150;")
    assert same_result(DATABASE, "SELECT count(*) FROM people", "SELECT count(*) FROM people", others=[other])[0]
    assert not same_result(DATABASE, "SELECT count(*) FROM people", "SELECT 200", others=[other])[0]


def test_that_no_copy_tells_is_said():
    assert same_result(DATABASE, "SELECT 1", "SELECT 1") == (True, "no copy")


def test_a_gold_query_that_does_not_run_is_a_fault():
    for gold in ("SELECT nothing FROM people", "SELECT random()"):
        with pytest.raises(ToolFault):
            same_result(DATABASE, gold, "SELECT 1")


def test_an_answer_may_cost_twice_what_the_gold_query_costs():
    every = "SELECT count(*) x FROM people a, people b, pets c, pets d WHERE d.id < 3 AND "  # some 20 million steps
    gold, answer = every + "a.height + b.height > c.id", every + "c.id < a.height + b.height"
    assert not query(gold).ok
    assert same_result(DATABASE, gold, answer) == (True, "")
    four = " UNION ALL ".join([answer] * 4)
    assert same_result(DATABASE, gold, f"SELECT max(x) FROM ({four})")[1].startswith("it takes too long")


def test_a_gold_query_is_run_once():
    def used():
        return [int(part) for part in open(f"/proc/{sql._idle[-1].pid}/stat").read().rsplit(")")[1].split()[11:13]]

    gold = "SELECT count(*) FROM people a, people b, pets c, pets d WHERE d.id < 5 AND a.height + b.height > c.id"
    assert same_result(DATABASE, gold, "SELECT 1") == (False, "another result")
    before = sum(used())
    for number in range(5):
        assert same_result(DATABASE, gold, f"SELECT {number}") == (False, "another result")
    assert (sum(used()) - before) / os.sysconf("SC_CLK_TCK") < 0.5  # seconds; a run of gold takes as long


def test_gold_results_that_are_kept_are_bounded():
    code = (
        f"import sys; sys.path.insert(0, {str(sql.SERVER.parent)!r}); import sql_server as s\n"
        "c = s.connect({'script': ''})\n"
        "for n in (100_000, 400_000):\n"
        "    for i in range(70): s._gold(c, f'SELECT {i}, hex(zeroblob({n}))')\n"
        "    print(len(s._golds), max(len(gold[0][0][1]) for gold in s._golds.values()))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["64", "200000"] * 2


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_database_that_is_not_there_is_a_fault(tmp_path):
    (tmp_path / "text.sqlite").write_text("no database")
    for path in (tmp_path / "nowhere.sqlite", tmp_path / "text.sqlite"):
        assert run_tool(SchemaTool(Database(file=str(path))), {}).fault
    assert run_tool(QueryTool(), {"sql": "SELECT 1"}).fault
    with pytest.raises(ValueError, match="exactly one of"):
        Database()


def test_a_process_that_is_killed_from_outside_is_replaced():
    query("SELECT 1")
    for process in sql._idle:
        os.kill(process.pid, signal.SIGKILL)
    assert query("SELECT 1").ok and len(sql._idle) >= 1


def address_space(process):
    return int(open(f"/proc/{process.pid}/statm").read().split()[0]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_memory_that_others_have_taken_makes_no_query_wrong():
    wide = "SELECT count(DISTINCT a.id || '-' || hex(zeroblob(200 + b.id))) FROM people a, people b"  # some tens of MB
    query("SELECT 1")

    def fill():
        assert sql._idle
        for process in sql._idle:
            most = address_space(process) + (1 << 20)
            resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))

    fill()
    assert query(wide).data["rows"] == [["40000"]]
    fill()
    assert same_result(DATABASE, wide, wide.replace("200 + b.id", "b.id + 200")) == (True, "")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")
def test_a_process_keeps_no_statements():
    def unions(number):  # short, and half a megabyte when it is prepared
        names = [f"a AS (SELECT id + {number} x FROM people)"]
        names += [f"{b} AS (SELECT x FROM {a} UNION ALL SELECT x FROM {a})" for a, b in pairwise("abcdefghijkl")]
        return f"WITH {', '.join(names)} SELECT x FROM l LIMIT 1"

    while sql._idle:
        sql.child_process.end(sql._idle.pop())
    assert query(unions(0)).ok
    before = address_space(sql._idle[0])
    assert all(query(unions(number)).ok for number in range(1, 9))
    assert address_space(sql._idle[0]) - before < 2 << 20


def test_a_fork_has_processes_of_its_own(in_fork):
    query("SELECT 1")
    mine = {process.pid for process in sql._idle}

    def child(results):
        results.put(query("SELECT 41 + 1").data["rows"])
        results.put(bool(mine & {process.pid for process in sql._idle}))

    assert in_fork(child, 2) == [[["42"]], False]
    assert query("SELECT 1").ok


def test_no_process_outlives_this_one():
    code = (
        "from agent_r1_tools.sql import Database, QueryTool, _idle\n"
        "QueryTool(Database(script='')).execute({'sql': 'SELECT 1'})\n"
        "print(_idle[0].pid, flush=True)\n"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    pid, deadline = int(done.stdout), time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}/cmdline") and "sql_server" in open(f"/proc/{pid}/cmdline").read():
        assert time.monotonic() < deadline
        time.sleep(0.05)
