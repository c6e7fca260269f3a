"""Programs that time one SDK each; a benchmark drives them in turn.

A worker reads one JSON command a line from its standard input and answers with one JSON line. The
worker of upstream's SDK runs in upstream's environment and imports nothing of this package.
"""
