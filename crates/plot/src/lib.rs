//! Plots as inline SVG and the style of the pages around them: no script, no network, nothing but strings in and out.

mod chart;
mod page;
mod style;
mod timeline;

pub use chart::{Axis, Line, Scale, bars, escape, groups, lines};
pub use page::{page, table};
pub use style::STYLE;
pub use timeline::{Box, Dot, Timeline};
