//! Input tensors of requests: random data that fits a model, or data from a file.

use anyhow::{Context, Result, anyhow, bail, ensure};
use bytes::Bytes;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_protocol::InferTensor;
use downbeat_protocol::http::{parse_request, words_as_objects};
use downbeat_protocol::infer::push_number;
use rand::{Rng, RngExt};
use rand_distr::StandardNormal;
use serde_json::value::RawValue;

/// Most bytes of the tensors of one request.
const MOST_BYTES: u64 = 1 << 30;
/// Upper bound of a lognormal size if none is given.
const DEFAULT_LONGEST: i64 = 512;

/// The command line's rules for inputs.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct InputRules {
    /// The size of the batch dimension.
    pub batch: i64,
    /// The rules of `--shape`.
    pub shapes: Vec<(String, Vec<i64>)>,
    /// The rules of `--shape-lognormal`.
    pub lognormal: Vec<(String, Lognormal)>,
    /// The rules of `--range`.
    pub ranges: Vec<(String, f64, f64)>,
}

/// Sizes whose logarithm is normal.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Lognormal {
    /// Mean of the logarithm.
    pub mu: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
    /// Largest size.
    pub longest: i64,
}

impl Lognormal {
    /// The size at a standard normal deviate.
    pub fn at(&self, deviate: f64) -> i64 {
        // A float that is too large saturates at i64::MAX.
        (((self.mu + self.sigma * deviate).exp().round()) as i64).clamp(1, self.longest.max(1))
    }
}

/// Splits `INPUT:REST` at the last colon: names of tensors may have colons (`input:0`).
fn named(text: &str) -> Option<(&str, &str)> {
    text.rsplit_once(':').filter(|(name, _)| !name.is_empty())
}

impl InputRules {
    /// Parses the rules of the command line.
    ///
    /// # Errors
    /// With the wrong flag and its expected form.
    pub fn parse(batch: u32, shapes: &[String], lognormal: &[String], ranges: &[String]) -> Result<Self> {
        ensure!(batch > 0, "--batch 0: a request has at least one item");
        let mut rules = InputRules { batch: i64::from(batch), ..InputRules::default() };
        for text in shapes {
            let wrong = || anyhow!("--shape {text}: expected INPUT:SIZE,SIZE,... with positive sizes");
            let (name, sizes) = named(text).ok_or_else(wrong)?;
            let sizes: Vec<i64> =
                sizes.split(',').map(|s| s.trim().parse()).collect::<Result<_, _>>().map_err(|_| wrong())?;
            ensure!(sizes.iter().all(|s| *s >= 0), wrong());
            rules.shapes.push((name.to_owned(), sizes));
        }
        for text in lognormal {
            let wrong = || anyhow!("--shape-lognormal {text}: expected INPUT:MU,SIGMA or INPUT:MU,SIGMA,MAX");
            let (name, numbers) = named(text).ok_or_else(wrong)?;
            let numbers: Vec<f64> =
                numbers.split(',').map(|s| s.trim().parse()).collect::<Result<_, _>>().map_err(|_| wrong())?;
            let (mu, sigma, longest) = match numbers[..] {
                [mu, sigma] => (mu, sigma, DEFAULT_LONGEST),
                [mu, sigma, longest] if longest >= 1.0 => (mu, sigma, longest as i64),
                _ => bail!(wrong()),
            };
            ensure!(mu.is_finite() && sigma.is_finite() && sigma >= 0.0, wrong());
            rules.lognormal.push((name.to_owned(), Lognormal { mu, sigma, longest }));
        }
        for text in ranges {
            let wrong = || anyhow!("--range {text}: expected INPUT:LOW,HIGH with LOW <= HIGH");
            let (name, bounds) = named(text).ok_or_else(wrong)?;
            let (low, high) = bounds.split_once(',').ok_or_else(wrong)?;
            let (low, high): (f64, f64) =
                (low.trim().parse().map_err(|_| wrong())?, high.trim().parse().map_err(|_| wrong())?);
            ensure!(low.is_finite() && high.is_finite() && low <= high, wrong());
            rules.ranges.push((name.to_owned(), low, high));
        }
        Ok(rules)
    }

    /// Checks that every rule about a named input names an input of some model.
    ///
    /// # Errors
    /// With the wrong name and the known names.
    pub fn check_names(&self, inputs: &[&TensorSpec]) -> Result<()> {
        let named = self.shapes.iter().map(|(n, _)| ("--shape", n));
        let named = named.chain(self.lognormal.iter().map(|(n, _)| ("--shape-lognormal", n)));
        let mut named = named.chain(self.ranges.iter().map(|(n, _, _)| ("--range", n)));
        if let Some((flag, name)) = named.find(|(_, n)| *n != "*" && !inputs.iter().any(|i| i.name == **n)) {
            let known: Vec<&str> = inputs.iter().map(|i| i.name.as_str()).collect();
            bail!("{flag}: no model has an input '{name}'; the inputs are {}", known.join(", "));
        }
        Ok(())
    }

    /// Inputs with random data, one for each of `specs`.
    ///
    /// # Errors
    /// If a dimension varies and no rule sizes it, or a rule does not fit.
    pub fn generate(&self, specs: &[TensorSpec], random: &mut impl Rng) -> Result<Vec<InferTensor>> {
        let deviate: f64 = random.sample(StandardNormal);
        let shapes = specs.iter().map(|spec| self.shape(spec, deviate)).collect::<Result<Vec<_>>>()?;
        let mut left = MOST_BYTES;
        specs
            .iter()
            .zip(shapes)
            .map(|(spec, shape)| {
                let elements = shape.iter().try_fold(1_u64, |n, s| n.checked_mul(u64::try_from(*s).ok()?));
                let size = elements.and_then(|n| n.checked_mul(spec.datatype.size().unwrap_or(8) as u64));
                let (Some(elements), Some(bytes)) = (elements, size) else {
                    bail!("input '{}' is too large", spec.name)
                };
                left = left.checked_sub(bytes).with_context(|| {
                    format!("a request of more than {MOST_BYTES} bytes: input '{}' has shape {shape:?}", spec.name)
                })?;
                let (name, data) = (spec.name.clone(), self.data(spec, elements, random).into());
                Ok(InferTensor { name, datatype: spec.datatype, shape, parameters: Default::default(), data })
            })
            .collect()
    }

    fn shape(&self, spec: &TensorSpec, deviate: f64) -> Result<Vec<i64>> {
        let matching = |name: &str| name == spec.name || name == "*";
        let mut dims = spec.dims.clone();
        let batched = dims.first() == Some(&-1);
        if batched && let Some(first) = dims.first_mut() {
            *first = self.batch;
        }
        if let Some((_, sizes)) = self.shapes.iter().find(|(name, _)| matching(name)) {
            let full: Vec<i64> = if sizes.len() + 1 == dims.len() {
                dims.iter().take(1).chain(sizes).copied().collect()
            } else {
                sizes.clone()
            };
            ensure!(
                full.len() == dims.len() && spec.dims.iter().zip(&full).all(|(dim, size)| *dim < 0 || dim == size),
                "--shape {}:{}: does not fit the model's shape {:?}",
                spec.name,
                join(sizes),
                spec.dims,
            );
            return Ok(full);
        }
        let lognormal = self.lognormal.iter().find(|(name, _)| matching(name)).map(|(_, l)| l.at(deviate));
        for dim in dims.iter_mut().filter(|d| **d < 0) {
            *dim = lognormal.with_context(|| {
                let example = spec.dims.iter().skip(usize::from(batched)).map(|d| if *d < 0 { 64 } else { *d });
                format!(
                    "input '{}' has the variable shape {:?}: give its sizes, as in --shape {}:{}",
                    spec.name,
                    spec.dims,
                    spec.name,
                    join(&example.collect::<Vec<_>>()),
                )
            })?;
        }
        Ok(dims)
    }

    fn data(&self, spec: &TensorSpec, elements: u64, random: &mut impl Rng) -> Vec<u8> {
        let range = self.ranges.iter().find(|(name, _, _)| *name == spec.name || name == "*");
        let (low, high) = range.map_or((0.0, 1.0), |(_, low, high)| (*low, *high));
        let mut data = Vec::new();
        for _ in 0..elements {
            let unit: f64 = random.random();
            let value = if spec.datatype == DataType::Bool {
                (unit * 2.0).floor()
            } else if spec.datatype.is_float() {
                low + unit * (high - low)
            } else {
                (low.ceil() + (unit * (high.floor() - low.ceil() + 1.0)).floor()).min(high.floor())
            };
            push_number(&mut data, spec.datatype, value);
        }
        data
    }
}

fn join(sizes: &[i64]) -> String {
    sizes.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
}

/// Reads the requests in a `--input` file. `NaN` and `Infinity` are allowed, as in the server.
///
/// # Errors
/// With the wrong request, and the reason.
pub fn from_json(text: &str) -> Result<Vec<Vec<InferTensor>>> {
    let rewritten;
    let requests: Vec<&RawValue> = match requests(text.as_bytes()) {
        Err(error) if error.is_syntax() => {
            rewritten = words_as_objects(text.as_bytes());
            rewritten.as_deref().map_or(Err(error), requests)
        }
        requests => requests,
    }
    .context("not JSON")?;
    ensure!(!requests.is_empty(), "no request in the list");
    let read = |(i, request): (usize, &&RawValue)| {
        let body = Bytes::copy_from_slice(request.get().as_bytes());
        let read = parse_request(String::new(), String::new(), body, None).with_context(|| format!("request {i}"));
        Ok(read?.0.inputs)
    };
    requests.iter().enumerate().map(read).collect()
}

/// The texts of the requests in a list, or of a single request.
fn requests(text: &[u8]) -> serde_json::Result<Vec<&RawValue>> {
    match text.trim_ascii_start().starts_with(b"[") {
        true => serde_json::from_slice(text),
        false => serde_json::from_slice(text).map(|one| vec![one]),
    }
}
