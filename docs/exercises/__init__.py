"""Exercises of the guided tour. Each file has one or two functions to complete, and the tests that
say when they are right.

    make exercises                                    all of them
    .venv/bin/python -m pytest docs/exercises/test_mesh.py

They fail until they are done: that is what they are for, and `make test` leaves them out.
tests/exercise_answers.py has an answer to each, and tests/test_exercises.py shows that the answers
pass and that the files as they are do not.
"""
