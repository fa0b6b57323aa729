//! Pictures as rows of an input that wants pixels.

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use clap::ValueEnum;
use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_preprocess::{Color, Filter, Order, PictureHeader, Pipeline, Recipe, Size, Step};
use downbeat_protocol::InferTensor;
use downbeat_report::note;

use super::wanted::{Wanted, WantedInput};

/// Most pixels of a picture, before or after it is resized.
const MAX_PIXELS: u64 = 1 << 26;

/// How the samples of a picture, 0 to 255, become numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pixels {
    /// As they are, 0 to 255
    Raw,
    /// 0 to 1
    Unit,
    /// -1 to 1
    Signed,
    /// Normalized as for ImageNet, as torchvision's models want them
    Imagenet,
}

impl Pixels {
    /// Scale, mean and standard deviation: a sample becomes `(sample * scale - mean) / deviation`.
    fn normalize(self) -> (f64, Vec<f64>, Vec<f64>) {
        match self {
            Pixels::Raw => (1.0, vec![], vec![]),
            Pixels::Unit => (1.0 / 255.0, vec![], vec![]),
            Pixels::Signed => (1.0 / 127.5, vec![1.0], vec![]),
            Pixels::Imagenet => (1.0 / 255.0, vec![0.485, 0.456, 0.406], vec![0.229, 0.224, 0.225]),
        }
    }

    fn words(self) -> &'static str {
        match self {
            Pixels::Raw => "0 to 255",
            Pixels::Unit => "0 to 1",
            Pixels::Signed => "-1 to 1",
            Pixels::Imagenet => "normalized as for ImageNet",
        }
    }
}

/// The layout of the pixels in a row of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    order: Order,
    is_gray: bool,
    /// Height and width; -1 where any size fits.
    size: [i64; 2],
}

impl Layout {
    /// The layout of a row of these sizes; `None` if the row is no picture. One dimension of n² elements
    /// is a gray square.
    fn of(row: &[i64]) -> Option<Layout> {
        let layout = |order, channels, size| Some(Layout { order, is_gray: channels == 1, size });
        match *row {
            [3, height, width] => layout(Order::Chw, 3, [height, width]),
            [height, width, 3] => layout(Order::Hwc, 3, [height, width]),
            [1, height, width] => layout(Order::Chw, 1, [height, width]),
            [height, width, 1] => layout(Order::Hwc, 1, [height, width]),
            [-1, height, width] => layout(Order::Chw, 3, [height, width]),
            [height, width, -1] => layout(Order::Hwc, 3, [height, width]),
            [height, width] => layout(Order::Hw, 1, [height, width]),
            [pixels] if pixels > 0 => {
                let side = pixels.isqrt();
                (side * side == pixels).then_some(Layout { order: Order::Hw, is_gray: true, size: [side, side] })
            }
            _ => None,
        }
    }

    /// The sizes of a row with this layout.
    fn dims(self) -> Vec<i64> {
        let [height, width] = self.size;
        let channels = if self.is_gray { 1 } else { 3 };
        match self.order {
            Order::Chw => vec![channels, height, width],
            Order::Hwc => vec![height, width, channels],
            Order::Hw => vec![height, width],
        }
    }

    /// The layout in words: `RGB, rows x columns x channels`.
    fn words(self) -> String {
        let colours = if self.is_gray { "gray" } else { "RGB" };
        match self.order {
            Order::Chw => format!("{colours} in NCHW"),
            Order::Hwc => format!("{colours} in NHWC"),
            Order::Hw => colours.to_owned(),
        }
    }
}

/// Whether an input can take pictures.
pub fn takes_pictures(input: &WantedInput) -> bool {
    // Two dimensions are as often a sequence of vectors as a gray picture.
    input.row().len() == 3 && is_number(input) && Layout::of(input.row()).is_some()
}

fn is_number(input: &WantedInput) -> bool {
    !matches!(input.datatype, DataType::Bool | DataType::Bytes)
}

/// Makes pictures into rows of an input, and tells what was assumed.
///
/// # Errors
/// If the input wants no pictures, or a picture cannot be read.
pub fn rows(
    pictures: &[Bytes],
    shown: &str,
    wanted: &Wanted,
    input: &WantedInput,
    pixels: Option<Pixels>,
) -> anyhow::Result<InferTensor> {
    let layout = Layout::of(input.row()).filter(|_| is_number(input)).with_context(|| {
        format!("{shown} is a picture, but input '{}' wants {}, which is none", input.name, input.form())
    })?;
    let fixed = match layout.size {
        [height, width] if height > 0 && width > 0 => Some([side(height)?, side(width)?]),
        [-1, -1] => None,
        _ => bail!("input '{}' wants {}: a size that no picture can be given", input.name, input.form()),
    };
    let (normalize, range) = normalize(wanted, input, pixels)?;
    let color = if layout.is_gray { Color::Gray } else { Color::Rgb };
    let mut steps = vec![Step::Decode { color, input: "image".to_owned(), fills: None }];
    steps.extend(fixed.map(|size| Step::Resize { size: Size::Both(size), filter: Filter::Bilinear }));
    steps.extend(normalize);
    steps.push(Step::Layout { order: layout.order });
    let dims = std::iter::once(-1).chain(layout.dims()).collect();
    let spec = TensorSpec { name: input.name.clone(), datatype: input.datatype, dims };
    let recipe = Recipe { steps, tokenizer: None };
    let pipeline = Pipeline::new(&recipe, &[spec], true, MAX_PIXELS).map_err(|why| anyhow!("{why}"))?;
    pipeline.look(pictures).map_err(|why| anyhow!("{shown}: {}", of_command(why)))?;
    let tensors = pipeline.run(pictures).map_err(|why| anyhow!("{shown}: {}", of_command(why)))?;
    let mut tensor = tensors.into_iter().next().context("the steps of a picture fill no input")?;
    if input.row().len() == 1 {
        tensor.shape = vec![pictures.len() as i64, input.row().first().copied().unwrap_or(-1)];
    }
    if !input.has_rows {
        if pictures.len() > 1 {
            bail!("model '{}' takes one picture a request; {}", wanted.model, wanted.wants());
        }
        tensor.shape.remove(0);
    }
    tell(pictures, fixed, layout, input, &range);
    Ok(tensor)
}

fn side(size: i64) -> anyhow::Result<u32> {
    u32::try_from(size).with_context(|| format!("a side of {size} pixels is too long for a picture"))
}

/// The words of an error of the server's steps, for a reader who set no option of a server.
fn of_command(error: impl std::fmt::Display) -> String {
    error.to_string().replace(" (preprocess.max_megapixels)", "").replace("input 'image'", "the command line")
}

/// The conversion of samples, and its words. Integers keep the samples.
fn normalize(wanted: &Wanted, input: &WantedInput, pixels: Option<Pixels>) -> anyhow::Result<(Option<Step>, String)> {
    let configured = wanted.pixels.filter(|_| pixels.is_none());
    if !input.datatype.is_float() {
        if !matches!(pixels, None | Some(Pixels::Raw)) || !matches!(configured, None | Some((1.0, 0.0))) {
            bail!(
                "input '{}' has the datatype {}, so that samples stay 0 to 255; leave out --pixels, and pixel_scale and \
                 pixel_offset of the configuration",
                input.name,
                input.datatype
            );
        }
        return Ok((None, Pixels::Raw.words().to_owned()));
    }
    if let Some((scale, offset)) = configured {
        let words = format!("sample * {scale} + {offset} (pixel_scale and pixel_offset of the configuration)");
        return Ok((Some(Step::Normalize { scale, mean: vec![-offset], std: vec![] }), words));
    }
    let chosen = pixels.unwrap_or(Pixels::Unit);
    let (scale, mean, std) = chosen.normalize();
    // ImageNet's three channels have a mean each; gray takes their middle.
    let gray = Layout::of(input.row()).is_some_and(|layout| layout.is_gray);
    let middle = |values: Vec<f64>| match values.as_slice() {
        [_, green, _] if gray => vec![*green],
        _ => values,
    };
    let words = match pixels {
        Some(_) => chosen.words().to_owned(),
        None => format!("{} (assumed; --pixels changes it)", chosen.words()),
    };
    Ok((Some(Step::Normalize { scale, mean: middle(mean), std: middle(std) }), words))
}

/// Tells what became of the first picture.
fn tell(pictures: &[Bytes], fixed: Option<[u32; 2]>, layout: Layout, input: &WantedInput, range: &str) {
    let header = pictures.first().and_then(|picture| PictureHeader::read(picture).ok());
    let Some(header) = header else { return };
    let (width, height) = (header.width, header.height);
    let size = match fixed {
        Some([high, wide]) if [high, wide] != [height, width] => {
            format!("resized from {width} x {height} to {wide} x {high}, ")
        }
        _ => format!("{width} x {height}, "),
    };
    note(format_args!("the picture as input '{}': {size}{}, {} {range}", input.name, layout.words(), input.datatype));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(width: u32, height: u32, colour: png::ColorType, samples: &[u8]) -> Bytes {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(colour);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(samples).unwrap();
        writer.finish().unwrap();
        file.into()
    }

    fn filled(
        picture: &Bytes,
        datatype: DataType,
        shape: &[i64],
        scale: Option<(f64, f64)>,
        pixels: Option<Pixels>,
    ) -> anyhow::Result<InferTensor> {
        let wanted = Wanted { pixels: scale, ..Wanted::of(&[("x", datatype, shape)]) };
        rows(std::slice::from_ref(picture), "a.png", &wanted, &wanted.inputs[0], pixels)
    }

    fn floats(tensor: &InferTensor) -> Vec<f32> {
        tensor.data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    #[test]
    fn the_samples_of_floats_are_scaled_and_those_of_integers_are_not() {
        let picture = encode(2, 1, png::ColorType::Grayscale, &[0, 255]);
        let tensor = filled(&picture, DataType::Fp32, &[-1, 1, 1, 2], None, None).unwrap();
        assert_eq!((tensor.shape.as_slice(), floats(&tensor)), ([1, 1, 1, 2].as_slice(), vec![0.0, 1.0]));
        let tensor = filled(&picture, DataType::Uint8, &[-1, 1, 2], None, None).unwrap();
        assert_eq!((tensor.shape.as_slice(), tensor.data.as_ref()), ([1, 1, 2].as_slice(), [0, 255].as_slice()));
        let of = |scale, pixels| floats(&filled(&picture, DataType::Fp32, &[-1, 1, 2], scale, pixels).unwrap());
        assert_eq!(of(Some((0.5, -1.0)), None), [-1.0, 126.5], "the configuration wins over the assumption");
        assert_eq!(of(Some((0.5, -1.0)), Some(Pixels::Signed)), [-1.0, 1.0], "the command line wins over both");
        assert_eq!(of(None, Some(Pixels::Raw)), [0.0, 255.0]);
        assert!((of(None, Some(Pixels::Imagenet))[1] - (1.0 - 0.456) / 0.224).abs() < 1e-5);
    }

    #[test]
    fn colours_lie_as_the_input_wants_them() {
        let picture = encode(2, 1, png::ColorType::Rgba, &[10, 20, 30, 255, 40, 50, 60, 0]);
        let samples = |shape: &[i64]| {
            let tensor = filled(&picture, DataType::Uint8, shape, None, None).unwrap();
            (tensor.shape.clone(), tensor.data.to_vec())
        };
        assert_eq!(samples(&[-1, 3, -1, -1]), (vec![1, 3, 1, 2], vec![10, 40, 20, 50, 30, 60]));
        assert_eq!(samples(&[-1, 1, 2, 3]), (vec![1, 1, 2, 3], vec![10, 20, 30, 40, 50, 60]));
        assert_eq!(samples(&[-1, 1, 2]).1, [18, 48]);
    }

    #[test]
    fn a_picture_is_resized_and_a_flat_row_is_a_square() {
        let picture = encode(4, 2, png::ColorType::Grayscale, &[100; 8]);
        let tensor = filled(&picture, DataType::Uint8, &[-1, 4], None, None).unwrap();
        assert_eq!((tensor.shape.as_slice(), tensor.data.as_ref()), ([1, 4].as_slice(), [100; 4].as_slice()));
        assert_eq!(filled(&picture, DataType::Fp32, &[-1, 3, 8, 8], None, None).unwrap().shape, [1, 3, 8, 8]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let picture = encode(2, 1, png::ColorType::Grayscale, &[0, 255]);
        for (datatype, shape) in [
            (DataType::Bytes, &[-1][..]),
            (DataType::Fp32, &[-1, 5]),
            (DataType::Fp32, &[-1, 2, 3, 4, 5]),
            (DataType::Bool, &[-1, 1, 2]),
        ] {
            let error = filled(&picture, datatype, shape, None, None).unwrap_err().to_string();
            assert!(error.starts_with("a.png is a picture, but input 'x' wants"), "{error}");
        }
        assert!(filled(&picture, DataType::Fp32, &[-1, 3, 1 << 30, 1 << 30], None, None).is_err());
        // A header that promises 2^31 x 2^31 pixels.
        let mut huge = picture.to_vec();
        huge[16..24].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff]);
        let error = filled(&huge.into(), DataType::Fp32, &[-1, 3, 8, 8], None, None).unwrap_err().to_string();
        assert!(error.contains("at most 67108864 are allowed") && !error.contains("preprocess"), "{error}");
        for cut in 0..picture.len() - 12 {
            assert!(filled(&picture.slice(..cut), DataType::Uint8, &[-1, 1, 2], None, None).is_err(), "{cut}");
        }
    }
}
