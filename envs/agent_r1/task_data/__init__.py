"""Sources of real data: a folder in the official format, or a download through `datasets`.

There are three ways, tried in this order:

    1. `data_dir=`        the folder of the set, with the official file names (an explicit folder is never skipped)
    2. `AGENT_R1_DATA`    an environment variable: a folder that holds one folder per set (hotpotqa, musique, ...)
    3. a download         pip install "agent-r1[data]"; the Hugging Face hub keeps it in its own cache

Data is read on first use and cached for the process: environments that share a set share its rows. Rows become
`Question`s, `Problem`s or `Program`s. A row in another format raises `DataFormatError`, which names the file, the row
and the field. Each set has a file here that reads its rows.
"""

from agent_r1.task_data.files import read_rows
from agent_r1.task_data.load import DATA_SETS, DATA_VARIABLE, find_file, has_questions, load_questions
from agent_r1.task_data.records import (
    DataFormatError,
    DataNotFoundError,
    DataSet,
    Problem,
    Program,
    Question,
    Row,
)

__all__ = [
    "DATA_SETS",
    "DATA_VARIABLE",
    "DataFormatError",
    "DataNotFoundError",
    "DataSet",
    "Problem",
    "Program",
    "Question",
    "Row",
    "find_file",
    "has_questions",
    "load_questions",
    "read_rows",
]
