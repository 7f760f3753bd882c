"""Which sequences go into which row of which rank: whole sequences, the same number of rows on every rank."""


def first_fit_decreasing(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Indices of `lengths`, row by row: the longest first, each into the first row that has room.

    Raises:
        ValueError: a length that fits no row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in longest_first(lengths):
        length = lengths[index]
        if length > row_tokens:
            raise ValueError(
                f"sample {index}: {length} tokens do not fit trainer.row_tokens = {row_tokens}; raise it"
            )
        row = next((row for row, free in enumerate(room) if free >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(row_tokens)
        rows[row].append(index)
        room[row] -= length
    return rows


def balanced(lengths: list[int], row_tokens: int, num_rows: int) -> list[list[int]] | None:
    """Indices of `lengths` in `num_rows` rows of about as many tokens; fullest row first.

    Longest processing time first (Graham 1969): the longest goes to the emptiest row. None if it does not
    fit there; then more rows are needed.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    filled = [0] * num_rows
    for index in longest_first(lengths):
        row = min(range(num_rows), key=lambda r: (filled[r], r))
        if filled[row] + lengths[index] > row_tokens:
            return None
        rows[row].append(index)
        filled[row] += lengths[index]
    order = sorted(range(num_rows), key=lambda r: (-filled[r], r))
    return [rows[row] for row in order]


def rows_of_ranks(lengths: list[int], row_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Rows of indices of `lengths` for each rank, the same number for all; a row may be empty.

    Ranks step from row to row together, so the rows of one round hold about as many tokens. One rank alone
    has full rows instead: as few as first fit gives.

    Raises:
        ValueError: a length that fits no row.
    """
    full = first_fit_decreasing(lengths, row_tokens)
    if ranks == 1:
        return [full]
    rounds = -(-len(full) // ranks)
    while (rows := balanced(lengths, row_tokens, rounds * ranks)) is None:
        rounds += 1
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    for number, row in enumerate(rows):
        turn, place = divmod(number, ranks)
        # to and fro, so that the rank that takes the fullest row of one round takes the emptiest of the next
        shares[place if turn % 2 == 0 else ranks - 1 - place].append(row)
    return shares


def longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
