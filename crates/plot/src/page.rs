//! What every page has around its plots.

use crate::chart::escape;
use crate::style::STYLE;

/// A whole page that needs nothing else: `title` as its title and first heading, `body` (HTML) below it.
pub fn page(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>{body}</main></body></html>\n"
    )
}

/// A table that can be scrolled: a column for each of `heads`, and `rows` (HTML) as they are.
pub fn table(heads: &[&str], rows: &str) -> String {
    let heads: String = heads.iter().map(|head| format!("<th scope=\"col\">{}</th>", escape(head))).collect();
    format!("<div class=\"scroll\"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_and_heads_are_escaped_and_what_is_html_is_kept() {
        let page = page("a < b", &table(&["p & q"], "<tr><td>1</td></tr>"));
        assert!(page.contains("<title>a &lt; b</title>") && page.contains("<h1>a &lt; b</h1><div"), "{page}");
        assert!(
            page.contains("<th scope=\"col\">p &amp; q</th></tr></thead><tbody><tr><td>1</td></tr></tbody>"),
            "{page}"
        );
    }
}
