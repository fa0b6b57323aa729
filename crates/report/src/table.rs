//! A table: text for a terminal, which is also Markdown, and HTML.
//!
//! By hand: comfy-table and tabled would replace the 30 lines that pad cells. They wrap cells where
//! we print columns below each other. They do not write HTML, the alignment row of Markdown, or
//! rows one by one while they are measured.

use std::fmt::{self, Display};

use crate::escape;

/// Rows of `T`, with a text for each column. [`Display`] prints all columns side by side. The
/// formatter may have a width (`{table:80}`). If the columns do not fit, the table is printed in
/// parts below each other, each with the first column.
///
/// ```
/// let models = [("mlp", 58_290), ("encoder", 912)];
/// let table = downbeat_report::Table::of(models).text("model", |row| row.0).number("requests/s", |row| row.1);
/// assert_eq!(table.to_string().lines().last(), Some("| encoder |        912 |"));
/// ```
#[derive(Clone, Debug)]
pub struct Table<T> {
    rows: Vec<T>,
    columns: Vec<Column>,
    /// Least characters of a column, to align rows that are printed one by one.
    least: usize,
}

#[derive(Clone, Debug)]
struct Column {
    name: String,
    /// Whether cells are aligned to the left, as words are; numbers are aligned to the right.
    left: bool,
    cells: Vec<String>,
}

impl Column {
    /// Writes a cell of this column, padded, after its bar.
    fn padded(&self, f: &mut impl fmt::Write, cell: &str, width: usize) -> fmt::Result {
        if self.left { write!(f, "| {cell:width$} ") } else { write!(f, "| {cell:>width$} ") }
    }
}

/// The text of an empty cell.
const NOTHING: &str = "–";

impl<T> Table<T> {
    /// A table with rows and no columns yet.
    pub fn of(rows: impl IntoIterator<Item = T>) -> Self {
        Table { rows: rows.into_iter().collect(), columns: Vec::new(), least: 0 }
    }

    fn column<C: Display>(mut self, name: &str, left: bool, cell: impl Fn(&T) -> C) -> Self {
        let cells = self.rows.iter().map(|row| cell(row).to_string()).collect();
        self.columns.push(Column { name: name.to_owned(), left, cells });
        self
    }

    /// Adds a column of numbers.
    #[must_use]
    pub fn number<C: Display>(self, name: &str, cell: impl Fn(&T) -> C) -> Self {
        self.column(name, false, cell)
    }

    /// Adds a column of words.
    #[must_use]
    pub fn text<C: Display>(self, name: &str, cell: impl Fn(&T) -> C) -> Self {
        self.column(name, true, cell)
    }

    /// Adds a column of numbers that some rows have; it is left out if no row has any.
    #[must_use]
    pub fn some<C: Display>(self, name: &str, cell: impl Fn(&T) -> Option<C>) -> Self {
        let cells: Vec<Option<C>> = self.rows.iter().map(cell).collect();
        if cells.iter().all(Option::is_none) {
            return self;
        }
        let cells = cells.into_iter().map(|cell| cell.map_or(NOTHING.to_owned(), |cell| cell.to_string())).collect();
        let mut table = self;
        table.columns.push(Column { name: name.to_owned(), left: false, cells });
        table
    }

    /// The same table with columns of at least this many characters, for a [`head`](Self::head) and
    /// rows that are printed one by one.
    #[must_use]
    pub fn at_least(self, least: usize) -> Self {
        Table { least, ..self }
    }

    fn width(&self, column: &Column) -> usize {
        let cells = column.cells.iter().chain([&column.name]).map(|cell| cell.chars().count());
        cells.max().unwrap_or(0).max(self.least)
    }

    /// The names of the columns and the line below them.
    pub fn head(&self) -> String {
        let mut out = String::new();
        let _ = self.write_head(&mut out, &self.columns.iter().collect::<Vec<_>>());
        out
    }

    /// The rows without the head.
    pub fn body(&self) -> String {
        let mut out = String::new();
        let _ = self.write_body(&mut out, &self.columns.iter().collect::<Vec<_>>());
        out
    }

    fn write_head(&self, f: &mut impl fmt::Write, columns: &[&Column]) -> fmt::Result {
        for column in columns {
            column.padded(f, &column.name, self.width(column))?;
        }
        f.write_str("|\n")?;
        for column in columns {
            let line = "-".repeat(self.width(column) + 1);
            if column.left { write!(f, "|{line}-")? } else { write!(f, "|{line}:")? }
        }
        f.write_str("|\n")
    }

    fn write_body(&self, f: &mut impl fmt::Write, columns: &[&Column]) -> fmt::Result {
        let widths: Vec<usize> = columns.iter().map(|column| self.width(column)).collect();
        for row in 0..self.rows.len() {
            for (column, width) in columns.iter().zip(&widths) {
                column.padded(f, column.cells.get(row).map_or("", String::as_str), *width)?;
            }
            f.write_str("|\n")?;
        }
        Ok(())
    }

    /// The table as HTML that can be scrolled. The first column names the rows if it is of words.
    pub fn html(&self) -> String {
        let head = |column: &Column| {
            let class = if column.left { " class=\"text\"" } else { "" };
            format!("<th scope=\"col\"{class}>{}</th>", escape(&column.name))
        };
        let heads: String = self.columns.iter().map(head).collect();
        let cell = |(at, column): (usize, &Column), row: usize| {
            let cell = escape(column.cells.get(row).map_or("", String::as_str));
            match column.left {
                true if at == 0 => format!("<th scope=\"row\">{cell}</th>"),
                true => format!("<td class=\"text\">{cell}</td>"),
                false => format!("<td>{cell}</td>"),
            }
        };
        let row = |row| -> String { self.columns.iter().enumerate().map(|at| cell(at, row)).collect() };
        let rows: String = (0..self.rows.len()).map(|at| format!("<tr>{}</tr>", row(at))).collect();
        format!("<div class=\"scroll\"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>")
    }
}

impl<T> Display for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = f.width().unwrap_or(usize::MAX);
        let Some((first, others)) = self.columns.split_first() else { return Ok(()) };
        let mut rest = others;
        loop {
            let mut taken = self.width(first) + 4;
            let fits = rest.iter().take_while(|column| {
                taken += self.width(column) + 3;
                taken <= most
            });
            // At least one column: one that is wider than the terminal goes over its edge.
            let (now, later) = rest.split_at(fits.count().max(1).min(rest.len()));
            let part: Vec<&Column> = std::iter::once(first).chain(now).collect();
            self.write_head(f, &part)?;
            self.write_body(f, &part)?;
            if later.is_empty() {
                return Ok(());
            }
            rest = later;
            f.write_str("\n")?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table<(&'static str, u32)> {
        Table::of([("a|<b>", 1), ("c", 1000)]).text("name", |row| row.0).number("n", |row| row.1)
    }

    #[test]
    fn words_are_to_the_left_and_numbers_to_the_right() {
        assert_eq!(table().to_string(), "| name  |    n |\n|-------|-----:|\n| a|<b> |    1 |\n| c     | 1000 |\n");
    }

    #[test]
    fn a_column_that_no_row_has_is_left_out() {
        let table = table().some("half", |row| (row.1 > 1).then_some(row.1 / 2)).some("none", |_| None::<u32>);
        assert!(table.head().contains("| half |") && !table.head().contains("none"), "{table}");
        assert!(table.body().contains("|    1 |    – |"), "{table}");
    }

    #[test]
    fn columns_that_do_not_fit_come_below_with_the_first() {
        let table = table().number("twice", |row| 2 * row.1);
        assert_eq!(format!("{table:24}"), table.to_string(), "24 characters are enough");
        let parts = format!("{table:23}");
        let (above, below) = parts.split_once("\n\n").expect("two parts");
        assert!(above.starts_with("| name  |    n |\n") && below.starts_with("| name  | twice |\n"), "{parts}");
        assert!(parts.lines().all(|line| line.chars().count() <= 23), "{parts}");
        assert_eq!(format!("{table:1}").matches("| name ").count(), 2, "one column at least in each part");
    }

    #[test]
    fn rows_printed_one_by_one_stand_below_the_head() {
        let of = |rows: &[u32]| Table::of(rows.to_vec()).number("n", |n| *n).at_least(5);
        assert_eq!(of(&[]).head() + &of(&[7]).body(), of(&[7]).to_string());
        assert_eq!(of(&[7]).body(), "|     7 |\n");
    }

    #[test]
    fn html_is_escaped_and_says_what_heads_are() {
        let html = table().html();
        assert!(
            html.contains(
                "<th scope=\"col\">n</th></tr></thead><tbody><tr><th scope=\"row\">a|&lt;b&gt;</th><td>1</td></tr>"
            ),
            "{html}"
        );
    }
}
