#!/usr/bin/env bash
# After a change of the code, make the recipes fit it again:
#
#     bash docs/recipes/rebase.sh
#
# Applies each patch to a copy of the last commit (with what has changed since, if git knows the
# files) by a three-way merge, and writes the patch anew. A patch that conflicts is left as it is:
# apply it here with `git apply --3way`, solve the conflict, and write `git diff HEAD --full-index -U1`
# to its file.
set -euo pipefail
cd "$(dirname "$0")/../.."

base=$(git stash create)
copy=$(mktemp -d)/copy
git worktree add --quiet --detach "$copy" "${base:-HEAD}"
trap 'git worktree remove --force "$copy"; rm -r "${copy%/copy}"' EXIT

failed=0
for patch in docs/recipes/*.patch; do
  git -C "$copy" reset --quiet --hard
  if git -C "$copy" apply --3way "$PWD/$patch" 2>"$copy.said"; then
    git -C "$copy" diff --cached --full-index --unified=1 >"$patch"
  else
    cat "$copy.said"
    echo "$patch: conflicts with the code, see above"
    failed=1
  fi
done
exit $failed
