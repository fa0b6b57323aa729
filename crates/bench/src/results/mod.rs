//! The results of a load: records, statistics, reports.

pub mod html;
pub mod outcome;
pub mod record;
pub mod report;
pub mod statistics;
