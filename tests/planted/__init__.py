"""Mistakes of users and of strategies: what `job=verify` must find, and name. `plants.py` is the list.

`conf` is a lab in which nothing is wrong; a word puts a class of `users`, `networks` or `strategies` in the place of
another one, as in `data._target_=tests.planted.users.Padded`, or a layer of a kind: `model.kind=centred`.
"""
