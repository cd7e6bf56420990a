#!/usr/bin/env bash
# Builds the documents as a site, in build/docs/site; a link that leads nowhere, or a page that is in no menu, fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/build.sh
source scripts/python.sh
need_environment build/venv/docs mkdocs-material mkdocstrings-python
build/venv/docs/bin/python tools/docs_site.py . build/docs/source
# Not --quiet: what is not said does not count as a warning either, and would not fail. Material for MkDocs tells of its plans.
NO_MKDOCS_2_WARNING=1 quietly build/docs/build.log build/venv/docs/bin/mkdocs build
echo "built: build/docs/site, $(find build/docs/site -name index.html | wc -l) pages"
