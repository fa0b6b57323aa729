//! Turns a picture into one item of a model's input: resized, cropped, normalised, laid out.

use downbeat_core::tensor::DataType;
use downbeat_protocol::infer::push_number;
use downbeat_protocol::pace;
use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::{U8, U8x3};
use fast_image_resize::{FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer};

use crate::decode::{Picture, decode, zeros};
use crate::picture_header::PictureHeader;
use crate::pipeline::Work;
use crate::step::{Color, Filter, Order, Size, Step};

/// The steps of a model that takes pictures, checked.
#[derive(Debug)]
pub(crate) struct PictureSteps {
    color: Color,
    resizes: Vec<Reshape>,
    order: Order,
    /// For each channel, the element of each of the 256 samples in the input's binary form.
    tables: Vec<Vec<u8>>,
    /// Bytes of an element of the input.
    element: usize,
    most_pixels: u64,
}

/// A change of a picture's size.
#[derive(Clone, Copy, Debug)]
enum Reshape {
    Resize(Size, Filter),
    /// Height and width.
    Crop([u32; 2]),
}

impl PictureSteps {
    /// Checks the steps after `decode`, for an input of this datatype.
    pub fn new(color: Color, steps: &[Step], datatype: DataType, most_pixels: u64) -> Result<Self, String> {
        let channels = if color == Color::Gray { 1 } else { 3 };
        let (mut resizes, mut normalize, mut order) = (Vec::new(), None, None);
        for (index, step) in steps.iter().enumerate() {
            // Step 1 is `decode`.
            let here = |reason: &str| format!("step {}, '{}': {reason}", index + 2, step.name());
            match step {
                Step::Resize { .. } | Step::Crop { .. } | Step::Normalize { .. } if order.is_some() => {
                    return Err(here("'layout' must be the last step"));
                }
                Step::Resize { .. } | Step::Crop { .. } if normalize.is_some() => {
                    return Err(here("this step must come before 'normalize'"));
                }
                Step::Resize { size, filter } => {
                    check_size(*size).map_err(|reason| here(&reason))?;
                    resizes.push(Reshape::Resize(*size, *filter));
                }
                Step::Crop { size } => {
                    check_size(*size).map_err(|reason| here(&reason))?;
                    resizes.push(Reshape::Crop(match size {
                        Size::One(side) => [*side; 2],
                        Size::Both(both) => *both,
                    }));
                }
                Step::Normalize { .. } if normalize.is_some() => return Err(here("this step is listed twice")),
                Step::Normalize { scale, mean, std } => {
                    normalize = Some((*scale, mean.clone(), std.clone()));
                }
                Step::Layout { .. } if order.is_some() => return Err(here("this step is listed twice")),
                Step::Layout { order: Order::Hw } if channels > 1 => {
                    return Err(here("the order hw has no channels; give the step 'decode' the color gray"));
                }
                Step::Layout { order: chosen } => order = Some(*chosen),
                Step::Decode { .. } => return Err(here("only the first step may be 'decode'")),
                _ => return Err(here("this step is for texts, but 'decode' is for pictures")),
            }
        }
        let tables = tables(channels, normalize, datatype)?;
        let element = datatype.size().unwrap_or(1);
        Ok(PictureSteps { color, resizes, order: order.unwrap_or(Order::Hwc), tables, element, most_pixels })
    }

    /// The sizes of an item; -1 where a size depends on the picture.
    pub fn item_dims(&self) -> Vec<i64> {
        let size = self.resizes.iter().fold([-1, -1], |_, reshape| match reshape {
            Reshape::Resize(Size::One(_), _) => [-1, -1],
            Reshape::Resize(Size::Both(size), _) | Reshape::Crop(size) => size.map(i64::from),
        });
        self.ordered(size)
    }

    fn ordered(&self, [height, width]: [i64; 2]) -> Vec<i64> {
        let channels = self.tables.len() as i64;
        match self.order {
            Order::Chw => vec![channels, height, width],
            Order::Hwc => vec![height, width, channels],
            Order::Hw => vec![height, width],
        }
    }

    /// The work that a picture will take, by its header.
    ///
    /// # Errors
    /// In words, if the bytes have no header, or the picture is too large.
    pub fn look(&self, bytes: &[u8]) -> Result<Work, String> {
        let header = PictureHeader::read(bytes)?;
        let check = |[height, width]: [u64; 2], what: &str| {
            let pixels = height.saturating_mul(width);
            if pixels <= self.most_pixels {
                return Ok(pixels);
            }
            Err(format!(
                "{what} {width} x {height} pixels, {pixels} in all, but at most {} are allowed \
                 (preprocess.max_megapixels)",
                self.most_pixels
            ))
        };
        let mut size = [u64::from(header.height), u64::from(header.width)];
        let decoded = check(size, "the picture has")?;
        header.check_length(bytes)?;
        let mut peak = decoded.saturating_mul(header.bytes_per_pixel());
        let mut all = decoded;
        for reshape in &self.resizes {
            size = reshape.size_after(size)?;
            let pixels = check(size, "the resized picture would have")?;
            peak = peak.saturating_add(pixels.saturating_mul(3));
            all = all.saturating_add(pixels);
        }
        let [height, width] = size;
        let item = height.saturating_mul(width).saturating_mul((self.tables.len() * self.element) as u64);
        Ok(Work { units: all, peak, item })
    }

    /// Makes an item of a picture that [`PictureSteps::look`] has accepted. Appends its elements to
    /// `data` and returns its shape.
    ///
    /// # Errors
    /// In words, if the picture cannot be decoded.
    pub fn run(&self, bytes: &[u8], data: &mut Vec<u8>) -> Result<Vec<i64>, String> {
        let header = PictureHeader::read(bytes)?;
        let mut picture = decode(bytes, header, self.tables.len())?;
        for reshape in &self.resizes {
            pace::step(picture.samples.len() as u64);
            picture = reshape.apply(picture)?;
        }
        pace::step(picture.samples.len() as u64);
        match self.element {
            1 => self.write::<1>(&picture, data),
            2 => self.write::<2>(&picture, data),
            4 => self.write::<4>(&picture, data),
            _ => self.write::<8>(&picture, data),
        }
        Ok(self.ordered([picture.height, picture.width].map(i64::from)))
    }

    fn write<const ELEMENT: usize>(&self, picture: &Picture, data: &mut Vec<u8>) {
        let tables: Vec<&[[u8; ELEMENT]]> = self.tables.iter().map(|table| table.as_chunks().0).collect();
        let element =
            |table: &[[u8; ELEMENT]], sample: u8| table.get(usize::from(sample)).copied().unwrap_or([0; ELEMENT]);
        let swap = self.color == Color::Bgr;
        match tables.as_slice() {
            [gray] => data.extend(picture.samples.iter().flat_map(|sample| element(gray, *sample))),
            _ if self.order == Order::Chw => {
                for (channel, table) in tables.iter().enumerate() {
                    let source = if swap { tables.len() - 1 - channel } else { channel };
                    let samples = picture.samples.iter().skip(source).step_by(tables.len());
                    data.extend(samples.flat_map(|sample| element(table, *sample)));
                }
            }
            _ => {
                for pixel in picture.samples.chunks_exact(tables.len()) {
                    for (channel, table) in tables.iter().enumerate() {
                        let source = if swap { tables.len() - 1 - channel } else { channel };
                        data.extend(element(table, pixel.get(source).copied().unwrap_or(0)));
                    }
                }
            }
        }
    }
}

impl Reshape {
    /// Height and width after the change.
    fn size_after(self, [height, width]: [u64; 2]) -> Result<[u64; 2], String> {
        match self {
            // The longer side is cut to whole pixels, as torchvision does.
            Reshape::Resize(Size::One(short), _) if height <= width => {
                Ok([u64::from(short), u64::from(short).saturating_mul(width) / height.max(1)])
            }
            Reshape::Resize(Size::One(short), _) => {
                Ok([u64::from(short).saturating_mul(height) / width.max(1), u64::from(short)])
            }
            Reshape::Resize(Size::Both(size), _) => Ok(size.map(u64::from)),
            Reshape::Crop([high, wide]) => {
                if height < u64::from(high) || width < u64::from(wide) {
                    return Err(format!(
                        "the picture has {width} x {height} pixels before the crop to {wide} x {high}; send a larger \
                         picture, or add a step 'resize' before the crop"
                    ));
                }
                Ok([high, wide].map(u64::from))
            }
        }
    }

    fn apply(self, picture: Picture) -> Result<Picture, String> {
        let before = [u64::from(picture.height), u64::from(picture.width)];
        let after = self.size_after(before)?;
        let [height, width] = after.map(|side| u32::try_from(side).unwrap_or(u32::MAX));
        match self {
            Reshape::Resize(..) if after == before => Ok(picture),
            Reshape::Resize(_, filter) => resize(&picture, height, width, filter),
            Reshape::Crop(_) => Ok(crop(&picture, height, width)),
        }
    }
}

fn resize(picture: &Picture, height: u32, width: u32, filter: Filter) -> Result<Picture, String> {
    let Picture { channels, .. } = *picture;
    let filter = match filter {
        Filter::Box => FilterType::Box,
        Filter::Bilinear => FilterType::Bilinear,
        Filter::Bicubic => FilterType::CatmullRom,
        Filter::Lanczos => FilterType::Lanczos3,
    };
    let bytes = (width as usize).saturating_mul(height as usize).saturating_mul(channels);
    let mut resized = Picture { width, height, channels, samples: zeros(bytes)? };
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter)).use_alpha(false);
    // Typed pixels: the program then holds the code for these two kinds alone, which saves 2 MB.
    let done = match channels {
        1 => resize_pixels::<U8>(picture, &mut resized, &options),
        _ => resize_pixels::<U8x3>(picture, &mut resized, &options),
    };
    done.map_err(|error| format!("the picture cannot be resized: {error}"))?;
    Ok(resized)
}

fn resize_pixels<P: PixelTrait>(
    from: &Picture,
    to: &mut Picture,
    options: &ResizeOptions,
) -> Result<(), Box<dyn std::error::Error>> {
    let from = TypedImageRef::<P>::from_buffer(from.width, from.height, &from.samples)?;
    let mut to = TypedImage::<P>::from_buffer(to.width, to.height, &mut to.samples)?;
    Ok(Resizer::new().resize_typed(&from, &mut to, options)?)
}

/// Cuts out the middle. Halves of a pixel are rounded to even, as torchvision does.
fn crop(picture: &Picture, height: u32, width: u32) -> Picture {
    let begin = |all: u32, kept: u32| (f64::from(all.saturating_sub(kept)) / 2.0).round_ties_even() as usize;
    let (top, left) = (begin(picture.height, height), begin(picture.width, width));
    let (row, kept) = (picture.width as usize * picture.channels, width as usize * picture.channels);
    let rows = picture.samples.chunks_exact(row.max(1)).skip(top).take(height as usize);
    let samples = rows.flat_map(|row| row.iter().skip(left * picture.channels).take(kept).copied()).collect();
    Picture { width, height, channels: picture.channels, samples }
}

fn check_size(size: Size) -> Result<(), String> {
    let sides = match size {
        Size::One(side) => [side; 2],
        Size::Both(both) => both,
    };
    match sides.iter().all(|side| (1..=u32::from(u16::MAX)).contains(side)) {
        true => Ok(()),
        false => Err(format!("a side of the size is not from 1 to {}", u16::MAX)),
    }
}

/// The element for each sample of each channel: `(sample * scale - mean) / std`, or the sample
/// itself.
fn tables(
    channels: usize,
    normalize: Option<(f64, Vec<f64>, Vec<f64>)>,
    datatype: DataType,
) -> Result<Vec<Vec<u8>>, String> {
    let (scale, mean, std) = match normalize {
        Some(_) if !datatype.is_float() => {
            return Err(format!(
                "'normalize' gives fractions, but the model's input is {datatype}; leave the step out"
            ));
        }
        Some(normalize) => normalize,
        None if matches!(datatype, DataType::Bytes | DataType::Bool | DataType::Int8) => {
            return Err(format!("samples are 0 to 255, but the model's input is {datatype}"));
        }
        None => (1.0, Vec::new(), Vec::new()),
    };
    let of_channel = |values: &[f64], channel: usize, what: &str, without: f64| match values {
        [] => Ok(without),
        [one] => Ok(*one),
        many if many.len() == channels => Ok(many.get(channel).copied().unwrap_or(without)),
        many => Err(format!("'normalize' has {} values of {what} for {channels} channels", many.len())),
    };
    let table = |channel| {
        let (mean, std) = (of_channel(&mean, channel, "mean", 0.0)?, of_channel(&std, channel, "std", 1.0)?);
        if !(scale.is_finite() && mean.is_finite() && std.is_finite() && std != 0.0) {
            return Err("'normalize' has a std of 0, or a value that is not a number".to_owned());
        }
        let mut table = Vec::new();
        (0..=u8::MAX).for_each(|sample| push_number(&mut table, datatype, (f64::from(sample) * scale - mean) / std));
        Ok(table)
    };
    (0..channels).map(table).collect()
}
