"""Exercises of the guided tour. Each file has one or two functions to complete, and tests that pass
when the functions are right.

    make exercises                                            all exercises
    .venv/bin/python -m pytest docs/exercises/test_mesh.py    one file

The tests fail until you have written the functions, so `make test` does not run them.
tests/docs/exercise_answers.py has an answer to each exercise. tests/docs/test_exercises.py checks
that the tests pass with these answers and fail without them.
"""
