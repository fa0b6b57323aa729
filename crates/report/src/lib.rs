//! The reports of commands: one [`Table`] that prints as text and as HTML, charts and timelines as
//! inline SVG, and the [`Page`] around them. [`Json`], [`Html`] and [`out`] are the places where
//! reports go. JSON holds the measurements themselves, by their `Serialize`.
//!
//! Plots are drawn by hand: a page must look right in dark mode and on paper, and must need no
//! script. Of the libraries for Rust, plotters writes its colours into the picture, and charming
//! brings a script. We need only lines, bars, points and timelines. Drawing them is little more
//! code than the styles that a library would need.

mod chart;
mod output;
mod page;
mod style;
mod table;
mod timeline;

pub use chart::{Axis, Cloud, Line, Mark, Scale, bars, escape, lines, marked, predictions};
pub use output::{Html, Json, Out, note, out, say, show, write};
pub use page::Page;
pub use table::Table;
pub use timeline::{Box, Dot, Timeline};
