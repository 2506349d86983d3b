"""MkDocs' hooks: the pages that are made of schema, recipes and code, and links to source files."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

from docs.generator.api import api_page
from docs.generator.experiments import experiments_page
from docs.generator.keys import keys_page
from docs.generator.pages import index, method_page
from docs.generator.recipes import all_methods, method_names
from docs.generator.sources import linked_sources, page_of, relinked, source_page

_SHIM = "https://unpkg.com/iframe-worker/shim"  # in Material's template


def made_pages() -> dict[str, str]:
    """Return the pages that no file of docs/ has, by their place in the site."""
    methods = all_methods()
    pages = {f"methods/{method.id}.md": method_page(method) for method in methods}
    pages |= {"methods.md": index(methods), "experiments.md": experiments_page()}
    return pages | {"keys.md": keys_page(), "api.md": api_page()}


def on_config(config: Any) -> Any:
    """List the methods' pages in the navigation."""
    pages: list[Any] = [{name: f"methods/{id}.md"} for id, name in method_names().items()]
    where = next(entry for entry in config["nav"] if "Methods" in entry)
    where["Methods"] = [{"All methods": "methods.md"}, *pages]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and the source files that any page links to."""
    made = made_pages()
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    texts |= made
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    done: set[str] = set()
    while texts:
        uri, text = texts.popitem()
        for path in linked_sources(text, uri) - done:
            done.add(path)
            page, content = page_of(path), source_page(path)
            files.append(File.generated(config, page, content=content))
            texts[page] = content
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let a page's links to the repository's files lead to their pages."""
    return relinked(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Let the search work from a disk without the network: its shim is in the site, too."""
    return output.replace(_SHIM, get_relative_url("assets/iframe-worker.js", page.url))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same in the page for a wrong address."""
    return output_content.replace(_SHIM, "assets/iframe-worker.js")
