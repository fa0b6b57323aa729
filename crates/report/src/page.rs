//! An HTML page without external files.

use crate::chart::LEGEND;
use crate::escape;
use crate::style::STYLE;
use crate::table::Table;

/// An HTML page without external files, scripts or network. Parts stand in the order in which they
/// are added.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// An empty page with this title and first heading.
    pub fn new(title: &str) -> Self {
        Page { title: escape(title), body: String::new() }
    }

    fn with(mut self, part: &str) -> Self {
        self.body += part;
        self
    }

    /// Adds an explaining paragraph; nothing if the text is empty.
    #[must_use]
    pub fn note(self, text: &str) -> Self {
        if text.is_empty() { self } else { self.with(&format!("<p class=\"sub\">{}</p>", escape(text))) }
    }

    /// Adds a paragraph that warns.
    #[must_use]
    pub fn warning(self, text: &str) -> Self {
        self.with(&format!("<p class=\"warn\"><strong>Note:</strong> {}</p>", escape(text)))
    }

    /// Adds lines of a file, to be copied.
    #[must_use]
    pub fn code(self, text: &str) -> Self {
        self.with(&format!("<pre>{}</pre>", escape(text.trim_end())))
    }

    /// Adds a heading.
    #[must_use]
    pub fn heading(self, text: &str) -> Self {
        self.with(&format!("<h2>{}</h2>", escape(text)))
    }

    /// Adds a few figures in large print: names and values.
    #[must_use]
    pub fn facts(self, facts: &[(&str, String)]) -> Self {
        let fact =
            |(name, value): &(&str, String)| format!("<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value));
        self.with(&format!("<dl class=\"facts\">{}</dl>", facts.iter().map(fact).collect::<String>()))
    }

    /// Adds plots, beside each other where there is room. A legend that all of them share stands once,
    /// below.
    #[must_use]
    pub fn plots(self, plots: &[String]) -> Self {
        if plots.is_empty() {
            return self;
        }
        let legend = common_legend(plots);
        let drawn: String = match legend {
            Some(legend) => plots.iter().map(|plot| plot.replace(legend, "")).collect::<String>() + legend,
            None => plots.concat(),
        };
        self.with(&format!("<div class=\"plots\">{drawn}</div>"))
    }

    /// Adds a table under a heading.
    #[must_use]
    pub fn table<T>(self, heading: &str, table: &Table<T>) -> Self {
        self.heading(heading).with(&table.html())
    }

    /// The text of the page.
    pub fn html(self) -> String {
        let Page { title, body } = self;
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
             <title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>{body}</main></body></html>\n"
        )
    }
}

/// The legend of several plots, if all that have one have the same.
fn common_legend(plots: &[String]) -> Option<&str> {
    let legend = |plot: &'_ String| Some(plot.find(LEGEND)?..plot.rfind("</figure>")?);
    let legends: Vec<&str> = plots.iter().filter_map(|plot| plot.get(legend(plot)?)).collect();
    let (first, others) = legends.split_first()?;
    (!others.is_empty() && others.iter().all(|other| other == first)).then_some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_legend_of_all_plots_stands_once() {
        let plot = |title: &str, names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let values = vec![1.0; names.len()];
            crate::bars(title, "", "", "y", &names, &[("g".to_owned(), values)])
        };
        let page = |plots: &[String]| Page::new("t").plots(plots).html();
        let same = page(&[plot("one", &["a", "b"]), plot("two", &["a", "b"])]);
        assert_eq!(same.matches(LEGEND).count(), 1, "{same}");
        assert!(same.contains("</figure><ul class=\"legend\">"), "{same}");
        let differ = page(&[plot("one", &["a", "b"]), plot("two", &["a", "c"])]);
        assert_eq!(differ.matches(LEGEND).count(), 2, "{differ}");
    }

    #[test]
    fn all_text_is_escaped() {
        let table = Table::of([1]).number("p & q", |n| *n);
        let page = Page::new("a < b").note("x & y").warning("<z>").facts(&[("f&", "<1".to_owned())]);
        let page = page.plots(&["<svg></svg>".to_owned()]).table("T>", &table).html();
        for expected in [
            "<title>a &lt; b</title>",
            "<h1>a &lt; b</h1><p class=\"sub\">x &amp; y</p>",
            "&lt;z&gt;",
            "<dt>f&amp;</dt><dd>&lt;1</dd>",
            "<div class=\"plots\"><svg></svg></div><h2>T&gt;</h2>",
            "<th scope=\"col\">p &amp; q</th></tr></thead><tbody><tr><td>1</td></tr></tbody>",
        ] {
            assert!(page.contains(expected), "{expected}: {page}");
        }
    }
}
