//! What commands report: one [`Table`] that prints as text and as HTML, charts and timelines as inline SVG, the [`Page`] around them,
//! and where all of it goes ([`Json`], [`Html`], [`out`]). JSON is what was measured itself, by its `Serialize`.
//!
//! Plots are drawn by hand, decided once: a page is to follow the reader's dark mode and paper, and to need no script. Of the libraries for Rust
//! plotters writes its colours into the picture, and charming brings a script; lines, bars, points and timelines are all that is needed, and are little
//! more than the styles that a library would have to be told.

mod chart;
mod output;
mod page;
mod style;
mod table;
mod timeline;

pub use chart::{Axis, Cloud, Line, Scale, bars, escape, lines, predictions};
pub use output::{Html, Json, Out, note, out, say, show, write};
pub use page::Page;
pub use table::Table;
pub use timeline::{Box, Dot, Timeline};
