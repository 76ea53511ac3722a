"""Rows of the formats other than JSON, and files of the hub: CSV, TSV, parquet, Arrow.

Runs that read no such file do not open this file.
"""
import contextlib
import csv
import io
import re

from configurator import InputError
from data import naming


def hub_file(name):
    # Returns the path of hf://datasets/OWNER/NAME/FILE in the hub's cache, to which the file is fetched.
    # Only the runs that have such a file import this.
    from huggingface_hub import HfApi, errors, hf_hub_download
    dataset, file = re.match("hf://datasets/([^/]*/?[^/]*)/?(.*)", name).groups()
    with naming(name):
        with contextlib.suppress(errors.EntryNotFoundError):
            if file:
                return hf_hub_download(dataset, file, repo_type="dataset")
        files = ", ".join(HfApi().list_repo_files(dataset, repo_type="dataset"))
        raise InputError(f"no such file; there are {files:.2000}")


def table_rows(file, ending):
    """Return the rows of an open file of the kind csv, tsv, parquet or arrow, one after the other."""
    if ending in ("csv", "tsv"):
        return csv_rows(file, ending)
    return arrow_rows(file, ending)


def csv_rows(file, ending):
    # Yields the rows of a CSV or TSV file, whose first line names the columns. A cell is a text, or absent if
    # it is empty.
    lines = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True,
                           delimiter="\t" if ending == "tsv" else ",")
    for row in lines:
        if None in row or None in row.values():
            raise InputError(f"line {lines.line_num} has more or fewer cells than the first line")
        yield {column: cell for column, cell in row.items() if cell}


def arrow_rows(file, ending):
    # Yields the rows of a parquet file, or of an Arrow file as the package datasets saves it.
    import pyarrow.parquet                                      # only those who have such a file wait for it
    if ending == "arrow":
        batches = pyarrow.ipc.open_stream(file)
    else:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(1000)
    for batch in batches:
        rows = batch.to_pylist()
        if "float" in str(batch.schema):                        # not in double, which needs no repair
            rows = [as_written(row, batch.schema) for row in rows]
        yield from rows


def as_written(value, kind):
    # Returns a row of the schema `kind`, or a value of Arrow's type `kind`, as it was written. In float16 and
    # float32 0.1 is to be 0.1, and not 0.10000000149.
    if isinstance(value, dict):
        return {field.name: as_written(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [as_written(item, kind.field(0).type) for item in value]
    if isinstance(value, float):
        return float(str(kind.to_pandas_dtype()(value)))
    return value
