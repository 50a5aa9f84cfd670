"""The pictures of a report: each is part of the page and a PNG file, or is left out."""

from pathlib import Path
from typing import Any

from recapp.reporting import page
from recapp.reporting.drawing import Picture

OF_EARLIER_REPORTS = ("latency", "throughput", "curves")  # pictures that are no longer drawn


class Gallery:
    """Collects the pictures of a report.

    Args:
        folder: The directory of the report and its pictures.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[dict[str, Any]] = []
        for file in (
            *folder.glob("metric_by_*.png"),
            *(folder / f"{name}.png" for name in OF_EARLIER_REPORTS),
        ):
            file.unlink(missing_ok=True)

    def show(self, name: str, title: str, drawn: Picture | str) -> str | None:
        """Write a picture and return it as HTML.

        Args:
            name: The name of the picture's file, without suffix.
            title: The title of the picture.
            drawn: The picture, or a sentence with the reason why there is none.

        Returns:
            HTML; None if there is no picture.
        """
        if isinstance(drawn, str):
            (self.folder / f"{name}.png").unlink(missing_ok=True)  # it belongs to an earlier report
            self.made.append({"what": title, "file": None, "left_out": drawn})
            return None
        self.made.append(
            {"what": title, "file": str(drawn.write(self.folder, "png")[0]), "left_out": None}
        )
        return page.figure(drawn, 3)

    def part(self, title: str, paragraphs: list[str], shown: list[str | None]) -> list[str]:
        """Return a part of the page: a heading, paragraphs, and pictures side by side.

        Args:
            title: The heading.
            paragraphs: The HTML of the paragraphs above the pictures.
            shown: The results of the last calls of `show`, one for each picture of this part.
        """
        drawn = [html for html in shown if html]
        missing = (
            [row for row in self.made[len(self.made) - len(shown) :] if row["left_out"]]
            if shown
            else []
        )
        why = [
            page.paragraph(f"Left out: {row['what']} ({row['left_out']}).", "quiet")
            for row in missing
        ]
        pictures = [page.columns(drawn)] if drawn else []
        return [page.heading(title), *paragraphs, *pictures, *why]
