"""Record the public surface anew: `python -m tests.repository.public_surface`.

Review the difference and describe it in CHANGELOG.md.
"""

from tests.repository.public_surface.subjects import SUBJECTS, record

for subject in SUBJECTS:
    print(f"{subject.path.name}: {'changed' if record(subject) else 'unchanged'}")
