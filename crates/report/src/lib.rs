//! What commands report: one [`Table`] that prints as text and as HTML, charts and timelines as inline SVG, the [`Page`] around them,
//! and where all of it goes ([`Json`], [`Html`], [`out`]). JSON is what was measured itself, by its `Serialize`.

mod chart;
mod output;
mod page;
mod style;
mod table;
mod timeline;

pub use chart::{Axis, Line, Scale, bars, escape, groups, lines};
pub use output::{Html, Json, Out, note, out, say, show, write};
pub use page::Page;
pub use table::Table;
pub use timeline::{Box, Dot, Timeline};
