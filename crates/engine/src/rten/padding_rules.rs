//! Rules for pools and convolutions whose padding RTen 0.27 gets wrong. Where `SAME_LOWER` puts an
//! odd element first, RTen puts it last. It pads quantised numbers with another number than their
//! zero point.

use crate::onnx::proto::AttributeProto;
use crate::onnx::rewrite::{Site, Verdict};

/// Below every index, even for an engine with 32-bit indices.
const BEFORE_FIRST: i64 = -(i32::MAX as i64);
pub(super) const AUTO_PAD: &str = "auto_pad";
pub(super) const PADS: &str = "pads";

/// A value with its elements in reverse along these axes.
pub(super) fn reversed(site: &mut Site<'_>, x: &str, axes: &[i64]) -> String {
    let each = |number| vec![number; axes.len()];
    let (from, to, along, step) =
        (site.weight(&each(-1)), site.weight(&each(BEFORE_FIRST)), site.weight(axes), site.weight(&each(-1)));
    site.add("Slice", &[x, &from, &to, &along, &step], Vec::new())
}

/// A window over one axis.
#[derive(Clone, Copy)]
struct Window {
    /// Elements from its first to its last.
    extent: i64,
    stride: i64,
}

impl Window {
    /// The windows of an operator; `None` if it does not give their sizes.
    fn all(site: &Site<'_>) -> Option<Vec<Window>> {
        let kernel = site.ints("kernel_shape")?;
        let ones = vec![1; kernel.len()];
        let (dilations, strides) = (site.ints("dilations"), site.ints("strides"));
        let (dilations, strides) = (dilations.unwrap_or_else(|| ones.clone()), strides.unwrap_or(ones));
        let windows = kernel.iter().zip(dilations).zip(strides);
        Some(windows.map(|((size, dilation), stride)| Window { extent: (size - 1) * dilation + 1, stride }).collect())
    }
}

/// The attribute `pads` with these numbers of elements added to each axis, the odd one `before` or
/// behind.
fn pads(totals: impl Iterator<Item = i64> + Clone, odd_before: bool) -> AttributeProto {
    let half = |total: i64, up: bool| if up { (total + 1) / 2 } else { total / 2 };
    let before = totals.clone().map(|total| half(total, odd_before));
    AttributeProto::ints(PADS, before.chain(totals.map(|total| half(total, !odd_before))).collect())
}

fn all_inputs(site: &Site<'_>) -> Vec<String> {
    site.node.input.clone()
}

/// Adds the operator with explicit padding, and `x` for its first input.
fn add_padded(site: &mut Site<'_>, x: Option<&str>, pads: Vec<AttributeProto>, output: String) {
    let inputs = all_inputs(site);
    let mut inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    if let (Some(x), Some(first)) = (x, inputs.first_mut()) {
        *first = x;
    }
    site.add_itself(&inputs, &[AUTO_PAD, PADS], pads, vec![output]);
}

/// A pool whose odd element of padding comes first.
pub(super) fn pool(site: &mut Site<'_>) -> Verdict {
    if !site.is(AUTO_PAD, "SAME_LOWER") {
        return Verdict::Right;
    }
    let Some(windows) = Window::all(site) else { return unknown_kernel() };
    if site.node.output.iter().skip(1).any(|output| !output.is_empty()) {
        // RTen refuses such an operator.
        return Verdict::Right;
    }
    let y = site.output(0);
    if windows.iter().all(|window| window.stride == 1) {
        let pads = pads(windows.iter().map(|window| window.extent - 1), true);
        add_padded(site, None, vec![pads], y);
        return Verdict::Rewritten;
    }
    if windows.iter().any(|window| window.extent < window.stride && window.extent > 1) {
        return Verdict::Wrong(
            "it pads behind the input where auto_pad is SAME_LOWER and strides are larger than the kernel".into(),
        );
    }
    // In reverse order, the odd element that must come first comes last.
    let axes: Vec<i64> = (2..2 + windows.len() as i64).collect();
    let x = site.input(0);
    let from_behind = reversed(site, &x, &axes);
    let pooled = site.fresh();
    let upper = AttributeProto::text(AUTO_PAD, "SAME_UPPER");
    site.add_itself(&[&from_behind], &[AUTO_PAD, PADS], vec![upper], vec![pooled.clone()]);
    let back = reversed(site, &pooled, &axes);
    site.add_as("Identity", &[&back], Vec::new(), &y);
    Verdict::Rewritten
}

/// A convolution whose odd element of padding comes first.
pub(super) fn convolution(site: &mut Site<'_>) -> Verdict {
    if !site.is(AUTO_PAD, "SAME_LOWER") {
        return Verdict::Right;
    }
    let Some(windows) = Window::all(site) else { return unknown_kernel() };
    let y = site.output(0);
    if windows.iter().all(|window| window.stride == 1) {
        let pads = pads(windows.iter().map(|window| window.extent - 1), true);
        add_padded(site, None, vec![pads], y);
        return Verdict::Rewritten;
    }
    let pads = same_pads(site, &windows, true);
    let x = site.input(0);
    let padded = site.add("Pad", &[&x, &pads], Vec::new());
    add_padded(site, Some(&padded), Vec::new(), y);
    Verdict::Rewritten
}

/// Adds the padding of a convolution of quantised numbers as an operator of its own, with zero
/// points. Returns the name of the padded input; `None`: there is no padding.
pub(super) fn padded_with_zero_points(site: &mut Site<'_>) -> Result<Option<String>, Verdict> {
    let (lower, upper) = (site.is(AUTO_PAD, "SAME_LOWER"), site.is(AUTO_PAD, "SAME_UPPER"));
    let said = site.ints(PADS).unwrap_or_default();
    let pads = match Window::all(site) {
        _ if !lower && !upper && said.iter().all(|pad| *pad == 0) => return Ok(None),
        Some(windows) if lower || upper => same_pads(site, &windows, lower),
        None if lower || upper => return Err(unknown_kernel()),
        _ => {
            let (before, behind) = said.split_at(said.len() / 2);
            site.weight(&[&[0, 0], before, &[0, 0], behind].concat())
        }
    };
    let (x, zero) = (site.input(0), site.input(2));
    let inputs = [x.as_str(), &pads, &zero];
    let inputs = if zero.is_empty() { &inputs[..2] } else { &inputs[..] };
    Ok(Some(site.add("Pad", inputs, Vec::new())))
}

/// A transposed convolution whose odd element comes first. The size of its input does not change
/// how much it cuts off.
pub(super) fn transposed_convolution(site: &mut Site<'_>) -> Verdict {
    if !site.is(AUTO_PAD, "SAME_LOWER") || site.attribute("output_shape").is_some() {
        return Verdict::Right;
    }
    let Some(windows) = Window::all(site) else { return unknown_kernel() };
    let more = site.ints("output_padding").unwrap_or_else(|| vec![0; windows.len()]);
    let totals: Vec<i64> =
        windows.iter().zip(more).map(|(window, more)| window.extent - window.stride + more).collect();
    if totals.iter().any(|total| *total < 0) {
        return Verdict::Wrong("it has no auto_pad for strides that are larger than the kernel".into());
    }
    let y = site.output(0);
    add_padded(site, None, vec![pads(totals.into_iter(), true)], y);
    Verdict::Rewritten
}

fn unknown_kernel() -> Verdict {
    Verdict::Wrong(
        "it pads behind the input where auto_pad is SAME_LOWER, and kernel_shape does not say by how much".into(),
    )
}

/// Adds the operators that compute the padding from the size of a run's input, so that `ceil(size /
/// stride)` windows fit. The padding has `max((ceil(size / stride) - 1) * stride + extent - size,
/// 0)` elements, the odd one before or behind.
fn same_pads(site: &mut Site<'_>, windows: &[Window], odd_before: bool) -> String {
    let axes = windows.len() as i64;
    let x = site.input(0);
    let shape = site.add("Shape", &[&x], Vec::new());
    let (from, to, along) = (site.weight(&[2]), site.weight(&[2 + axes]), site.weight(&[0]));
    let size = site.add("Slice", &[&shape, &from, &to, &along], Vec::new());
    let strides: Vec<i64> = windows.iter().map(|window| window.stride).collect();
    // ceil(size / stride) - 1 = floor((size - 1) / stride)
    let (one, stride) = (site.integer(1), site.weight(&strides));
    let last = site.add("Sub", &[&size, &one], Vec::new());
    let steps = site.add("Div", &[&last, &stride], Vec::new());
    let begin = site.add("Mul", &[&steps, &stride], Vec::new());
    let extent = site.weight(&windows.iter().map(|window| window.extent).collect::<Vec<_>>());
    let end = site.add("Add", &[&begin, &extent], Vec::new());
    let beyond = site.add("Sub", &[&end, &size], Vec::new());
    let (zero, two) = (site.integer(0), site.integer(2));
    let total = site.add("Max", &[&beyond, &zero], Vec::new());
    let small = site.add("Div", &[&total, &two], Vec::new());
    let large = site.add("Sub", &[&total, &small], Vec::new());
    let (before, behind) = if odd_before { (large, small) } else { (small, large) };
    let others = site.weight(&[0, 0]);
    let parts = [others.as_str(), &before, &others, &behind];
    site.add("Concat", &parts, vec![AttributeProto::int("axis", 0)])
}
