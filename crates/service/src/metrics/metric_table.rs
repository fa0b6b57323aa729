//! Metrics as a table: each is declared once, in one line.

use prometheus::core::Collector;
use prometheus::{
    CounterVec, Error, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts,
    Registry,
};

/// A kind of metric.
pub trait Metric: Collector + Clone + Sized + 'static {
    /// A metric of this kind. `buckets`: the upper bounds of a histogram's.
    ///
    /// # Errors
    /// If it cannot be called that.
    fn make(opts: Opts, labels: &[&str], buckets: &[f64]) -> Result<Self, Error>;

    /// As [`Metric::make`], and adds the metric to a registry.
    ///
    /// # Errors
    /// If it cannot be called that, or another is: a defect.
    fn register(registry: &Registry, opts: Opts, labels: &[&str], buckets: &[f64]) -> Result<Self, Error> {
        let metric = Self::make(opts, labels, buckets)?;
        registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }
}

macro_rules! kinds {
    ($($kind:ident: |$opts:ident, $labels:ident, $buckets:ident| $make:expr;)*) => {$(
        impl Metric for $kind {
            fn make($opts: Opts, $labels: &[&str], $buckets: &[f64]) -> Result<Self, Error> {
                $make
            }
        }
    )*};
}

kinds! {
    IntCounter: |opts, _labels, _buckets| IntCounter::with_opts(opts);
    Gauge: |opts, _labels, _buckets| Gauge::with_opts(opts);
    IntCounterVec: |opts, labels, _buckets| IntCounterVec::new(opts, labels);
    CounterVec: |opts, labels, _buckets| CounterVec::new(opts, labels);
    IntGaugeVec: |opts, labels, _buckets| IntGaugeVec::new(opts, labels);
    GaugeVec: |opts, labels, _buckets| GaugeVec::new(opts, labels);
    HistogramVec: |opts, labels, buckets| HistogramVec::new(HistogramOpts::from(opts).buckets(buckets.to_vec()), labels);
}

/// A struct of metrics, and `register`, which makes them. Each metric has its field and kind, its
/// labels, the buckets of a histogram, its name, and its help.
#[macro_export]
macro_rules! metric_table {
    ($(#[$doc:meta])* $visibility:vis struct $table:ident {
        $($field:ident: $kind:ident[$($label:expr),*] $($buckets:ident)?, $name:literal, $help:literal;)*
    }) => {
        $(#[$doc])*
        $visibility struct $table {
            $($field: prometheus::$kind,)*
        }

        impl $table {
            /// Makes the metrics, and adds them to a registry.
            ///
            /// # Errors
            /// If two metrics had the same name: a defect.
            $visibility fn register(registry: &prometheus::Registry) -> Result<Self, prometheus::Error> {
                use $crate::metrics::metric_table::Metric;
                Ok($table {
                    $($field: Metric::register(registry, prometheus::Opts::new($name, $help), &[$($label),*], &<[&[f64]]>::concat(&[$(&$buckets[..])?]))?,)*
                })
            }
        }
    };
}
