"""What the queue keeps on disk: payload in a segmented log, everything else in a ledger file.

    asyncrl/queue/durable/
        place.py, rows.py      what the two hand on: a payload's place, rows, one transaction, a snapshot
        record.py              headers: what proves that bytes are the payload they are taken for
        disk.py                room, locks, whole writes
        segment_file.py        one file of the log
        spares.py              released files, to be written anew
        segments.py            the log: append, sync, read, check, release, adopt
        row_codec.py           rows as bytes, with checksums
        ledger_file.py         the ledger (SQLite): write, load, prune
        ledger_view.py         the same file for another process, read-only
        recovery.py            both at start: what is usable, what is issued again, what was cut

The order of a group commit is log append → log sync (``synced``) → ledger transaction → replies; the order of freeing is
ledger transaction → log release. So a ledger row never names payload that was not written before it, nor one freed already.

Source: design note, section 4, "Durability".
"""
